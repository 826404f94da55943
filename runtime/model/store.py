"""Where a model's files are: a folder, a file, an alias fetched once, or a hub. Torch-free."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ..protocol.errors import ModelError
from . import catalog
from .catalog import CatalogEntry
from .loader.gguf import GGUFFile

ModelKind = Literal["hf", "gguf", "config"]
_DEFAULT_HOME = "~/.cache/ramet"


@dataclass(frozen=True)
class ModelFiles:
    """The files of one model that was found.

    ``hf``: a folder with config.json and safetensors. ``gguf``: one file, ``folder`` beside it when
    the user named the folder. ``config``: a config.json alone; its weights can only be made up.
    """

    kind: ModelKind
    name: str
    """What to call the model where people see it."""
    folder: Path | None
    """Where side files (tokenizer.json and its like) are looked for."""
    gguf_path: Path | None = None
    config_path: Path | None = None

    @property
    def path(self) -> Path:
        """The GGUF, the config.json given by itself, or the folder."""
        path = self.gguf_path or self.folder or self.config_path
        assert path is not None
        return path

    @cached_property
    def gguf(self) -> GGUFFile:
        """The parsed GGUF. Only for ``kind == "gguf"``."""
        assert self.gguf_path is not None
        return GGUFFile(self.gguf_path)

    def side_file(self, name: str) -> Path | None:
        """The path of a file beside the model, or None where there is none."""
        if self.folder is None:
            return None
        path = self.folder / name
        return path if path.is_file() else None

    @property
    def tokenizer_json(self) -> Path | None:
        return self.side_file("tokenizer.json")

    def config(self) -> dict[str, Any]:
        """config.json. Raises `ModelError` where there is none, or it is not JSON."""
        path = self.config_path or self.side_file("config.json")
        if path is None:
            raise ModelError(f"{self.path} has no config.json")
        return read_json(path)

    def generation_config(self) -> dict[str, Any]:
        return self._optional_json("generation_config.json")

    def tokenizer_config(self) -> dict[str, Any]:
        return self._optional_json("tokenizer_config.json")

    def chat_template(self) -> str | None:
        """The model's own: chat_template.jinja, then tokenizer_config.json, then the GGUF."""
        path = self.side_file("chat_template.jinja")
        if path is not None:
            return path.read_text(encoding="utf-8")
        template = self.tokenizer_config().get("chat_template")
        if isinstance(template, list):  # named templates, as [{"name": …, "template": …}]
            named = {item.get("name"): item.get("template") for item in template}
            template = named.get("default") or next(iter(named.values()), None)
        if template is None and self.kind == "gguf":
            template = self.gguf.metadata.get("tokenizer.chat_template")
        return template if isinstance(template, str) and template else None

    def weight_files(self) -> list[Path]:
        """The safetensors of the model, shards in the order of their names."""
        if self.folder is None:
            return []
        index = self.side_file("model.safetensors.index.json")
        if index is not None:
            names = sorted(set(read_json(index).get("weight_map", {}).values()))
            paths = [self.folder / name for name in names]
            missing = [path.name for path in paths if not path.is_file()]
            if missing:
                raise ModelError(f"{self.folder} lacks {', '.join(missing)}, which its index names")
            return paths
        single = self.side_file("model.safetensors")
        return [single] if single else sorted(self.folder.glob("*.safetensors"))

    def _optional_json(self, name: str) -> dict[str, Any]:
        path = self.side_file(name)
        return read_json(path) if path else {}


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One line of ``ramet models list``."""

    alias: str
    also: tuple[str, ...]
    path: Path | None
    """Where the file is, or None when it has to be fetched."""
    size: int
    download_size: int
    license: str
    summary: str


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises `ModelError` naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object")
    return value


def home() -> Path:
    """The cache folder: ``RAMET_HOME``, by default ~/.cache/ramet."""
    return Path(os.environ.get("RAMET_HOME") or _DEFAULT_HOME).expanduser()


def model_folder(entry: CatalogEntry) -> Path:
    return home() / "models" / entry.alias


def cached_path(entry: CatalogEntry) -> Path | None:
    """The fetched file of an alias. One of another size is not taken for it."""
    path = model_folder(entry) / entry.filename
    try:
        return path if path.stat().st_size == entry.size else None
    except OSError:
        return None


def installed_path(entry: CatalogEntry) -> Path | None:
    """The file inside an installed package, when one package carries it whole."""
    if len(entry.parts) != 1:
        return None
    part = entry.parts[0]
    try:
        spec = importlib.util.find_spec(part.module)
    except (ImportError, ValueError):
        return None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder).parent / part.member
        if path.is_file() and path.stat().st_size == entry.size:
            return path
    return None


def list_models() -> list[ModelRow]:
    """Every alias, fetched or not."""
    return [
        ModelRow(
            entry.alias,
            entry.also,
            cached_path(entry) or installed_path(entry),
            entry.size,
            entry.download_size,
            entry.license,
            entry.summary,
        )
        for entry in catalog.CATALOG
    ]


def resolve(model: str, *, fetch: bool = True) -> ModelFiles:
    """Find a model: a folder, a .gguf or .json file, an alias, or a hub id, in this order.

    With ``fetch`` an alias that is not there yet is downloaded. Raises `ModelError` saying what was
    looked for and what would help.
    """
    if not model:
        raise ModelError("no model was named")
    path = Path(model).expanduser()
    if path.is_dir():
        return _from_folder(path)
    if path.is_file():
        return _from_file(path)
    entry = catalog.find(model)
    if entry is not None:
        return _from_alias(entry, fetch=fetch)
    if path.is_absolute() or path.suffix in (".gguf", ".json") or model.startswith((".", "~")):
        raise ModelError(f"there is no file or folder {path}")
    return _from_hub(model)


def _from_folder(folder: Path) -> ModelFiles:
    name = folder.resolve().name
    ggufs = sorted(folder.glob("*.gguf"))
    if (folder / "config.json").is_file():
        has_weights = any(folder.glob("*.safetensors"))
        if has_weights or not ggufs:
            return ModelFiles("hf" if has_weights else "config", name, folder)
    if len(ggufs) == 1:
        return ModelFiles("gguf", name, folder, gguf_path=ggufs[0])
    if ggufs:
        names = ", ".join(path.name for path in ggufs)
        raise ModelError(f"{folder} holds several GGUF files ({names}): name one of them")
    raise ModelError(f"{folder} holds neither a config.json nor a .gguf file")


def _from_file(path: Path) -> ModelFiles:
    if path.suffix == ".gguf":
        return ModelFiles("gguf", path.stem, None, gguf_path=path)
    if path.suffix == ".json":
        return ModelFiles("config", path.stem, None, config_path=path)
    raise ModelError(f"{path} is no model: a folder, a .gguf or a config .json is expected")


def _from_alias(entry: CatalogEntry, *, fetch: bool) -> ModelFiles:
    path = cached_path(entry) or installed_path(entry)
    if path is None:
        if not fetch:
            raise ModelError(
                f"{entry.alias} is not on this machine; `ramet models fetch {entry.alias}` gets it"
            )
        from .fetch import fetch_model

        path = fetch_model(entry)
    return ModelFiles("gguf", entry.alias, None, gguf_path=path)


def _from_hub(model: str) -> ModelFiles:
    known = ", ".join(entry.alias for entry in catalog.CATALOG)
    unknown = (
        f"{model} is neither a folder, a .gguf file nor an alias (known: {known}); "
        f"`ramet models fetch {catalog.CATALOG[0].alias}` gets the default model"
    )
    if model.count("/") != 1:
        raise ModelError(unknown)
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ModelError(f"{unknown}; a hub id needs the huggingface_hub package")
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise ModelError(f"{unknown}; HF_HUB_OFFLINE forbids looking on a hub")
    from huggingface_hub import snapshot_download

    wanted = ["*.safetensors", "*.json", "*.jinja"]
    try:
        folder = snapshot_download(model, allow_patterns=wanted)
    except Exception as error:  # the hub's client raises its own, httpx's and OSError alike
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(f"{unknown}; looking on the hub failed: {reason[0]}") from None
    found = _from_folder(Path(folder))
    return ModelFiles(found.kind, model, found.folder, found.gguf_path, found.config_path)
