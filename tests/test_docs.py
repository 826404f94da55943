"""What the documents show runs: programs by script, the JSON form through the intake."""

from __future__ import annotations

import inspect
import re
import runpy
from pathlib import Path

import msgspec
import pytest
import ramet as rt
from ramet.backends.generation import GeneratingBackend
from ramet.runtime.config import ABSENT, EngineConfig
from ramet.runtime.program.instructions import Program
from ramet.runtime.program.intake import Intake
from ramet.runtime.program.limits import Limits

ROOT = Path(__file__).parent.parent


def blocks(document: str, language: str) -> list[str]:
    text = (ROOT / document).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


class Scripted(rt.testing.ScriptedBackend):
    """Stands in for `Runtime`."""

    def __init__(self, model_path: str) -> None:
        super().__init__({"tip": ["Go to bed early.", "Drink no coffee."], "best": "2"})

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return None


@pytest.mark.parametrize("document", ["README.md", "docs/programs.md"])
def test_the_first_program_runs(document, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rt, "Runtime", Scripted, raising=False)
    path = tmp_path / "program.py"
    path.write_text(blocks(document, "python")[0])
    runpy.run_path(str(path))
    out = capsys.readouterr().out
    assert out.startswith("2 <system>You are terse.</system>")
    assert "Go to bed early.\n" in out
    assert out.endswith("Best: 2</assistant>\n\n")


def test_the_json_form_is_a_program():
    (text,) = blocks("docs/programs.md", "json")
    program = msgspec.json.decode(text, type=Program)
    intake = Intake.of({"topic": "sleep"}, Limits())
    taken = [intake.take(instruction) for instruction in program.instructions]
    assert len(taken) == 9
    assert [gather.name for item in taken for gather in item.gathers] == ["tip"]


def test_the_table_of_the_json_form_names_every_field():
    text = (ROOT / "docs/programs.md").read_text()
    tags = re.search(r"^\| `type`.*?\n\n", text, re.MULTILINE | re.DOTALL)
    assert tags is not None
    described = {
        name: set(re.findall(r"\w+", fields))
        for names, fields in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.*?) \|", tags[0], re.M)
        for name in re.findall(r"\w+", names)
    }
    kinds = Program.__annotations__ and msgspec.inspect.type_info(Program)
    union = next(f for f in kinds.fields if f.name == "instructions").type.item_type
    assert {struct.cls.__struct_config__.tag for struct in union.types} == described.keys() - {
        "type"
    }
    for struct in union.types:
        fields = {field.name for field in struct.fields} - {"stream", "op", "line"}
        assert fields <= described[struct.cls.__struct_config__.tag]


def test_the_readme_names_only_settings_that_are_there():
    text = (ROOT / "README.md").read_text().split("## Settings")[1].split("## Errors")[0]
    rows = re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named
    assert named <= set(EngineConfig.__struct_fields__)
    assert not named & set(ABSENT)


def test_the_signature_of_generate_is_the_real_one():
    (shown,) = blocks("docs/http.md", "text")
    names = re.findall(r"(\w+)=(-?\w+)", shown)
    signature = inspect.signature(GeneratingBackend.generate)
    real = [(p.name, str(p.default)) for p in signature.parameters.values() if p.name != "self"]
    assert names == real
