"""Every example runs: on the real model, and as a script with its options."""

from __future__ import annotations

import re
import runpy
import sys
import time
from typing import Any

import pytest
import ramet as rt

# What the model's answer shows in any case, as regular expressions over the printed text.
SHOWS = {
    "async_programs": [r"Tokyo", r"(?i)penguins", r"given up in time: True"],
    "branches": [r"branch 3", r"best: [123]\. \S", r"found in the tree: \[\d+, \d+, \d+\]"],
    "chat": [r"assistant: .*Paris", r"user: .*famous", r"turn 3: \d+ prompt tokens, \d+ of them"],
    "classify": [
        r"sports +\d+% +Champion",
        r"politics +\d+% +Minister",
        r"science +\d+% +Physicists",
        r"music +\d+% +Band",
    ],
    "debate": [r"agent 1: I prefer cats because \w", r"agent 2: .*dogs", r"winner: (cats|dogs)\n"],
    "few_shot_qa": [r"Italy\? Rome\n", r"Spain\? Madrid\n", r"Egypt\? Cairo\n", r"Greece\? Athens"],
    "judge": [r"clarity: (poor|fair|good|excellent)\. \w", r"style: \w", r"all in all, \w"],
    "parallel_tips": [r"eating well: \w", r"exercise: \w", r"sleep: \w", r"In short: \w"],
    "react_agent": [r"Action: lookup\[Rome\]\nObservation: 2800000\n", r"answer: 2800000\n"],
    "react_compiled": [
        r"^   0  repeat +4 times counted in steps",
        r"Rome\? 2800000 after 2 steps\n.*-> lookup\n.*-> finish\n",
        r"Madrid\? 3300000 after 2 steps",
    ],
    "retrieval_qa": [
        r"built\?\n .*1871",
        r"cost\?\n .*12",
        r"closed\?\n .*Monday",
        r"baker\?\n .*Ole",
    ],
    "self_consistency": [r"pencils does she have\?\n", r"^8: [3-8] of 8 votes"],
    "skeleton_of_thought": [r"1\. \w.*: \w", r"2\. \w.*: \w", r"3\. \w.*: \w"],
    "structured": [
        r"kettle boils.*\n  [a-z]+, \*{1,5}, (friendly|neutral|angry); it says \d",
        r"Best lamp.*\n  [a-z]+, \*{1,5}, (friendly|neutral|angry); it says \d",
        r"squeaks\.\n  [a-z]+, \*{1,5}, (friendly|neutral|angry); it says \d",
    ],
    "tree_of_thought": [r"\AOnce upon a time there was a small fox\. \w"],
    "unit_test": [r"Kind: (question|complaint)\nReply: ?\w"],
}


@pytest.mark.model
@pytest.mark.parametrize("name", SHOWS)
def test_an_example_on_the_real_model(name, example, runtime, capsys):
    example(name).main(runtime)
    out = capsys.readouterr().out
    for pattern in SHOWS[name]:
        assert re.search(pattern, out, re.MULTILINE), f"{pattern!r} is not in\n{out}"
    assert released(runtime)


def released(runtime: rt.Runtime, seconds: float = 5.0) -> bool:
    """Whether nothing is held any more; what was cancelled is let go at the next step."""
    deadline = time.monotonic() + seconds
    while runtime.server_info()["pages"]["held"]:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_every_example_is_run_and_listed(folder):
    names = {path.stem for path in folder.glob("*.py")}
    assert names == SHOWS.keys()
    listed = re.findall(r"^\| `(\w+)\.py` \| \S", (folder / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(names)


class Stand:
    """Stands in for both backends of the scripts: whatever is asked for gets an answer."""

    opened: list[tuple[str, tuple[Any, ...]]]

    def __init__(self) -> None:
        self.opened = []

    def of(self, kind: str) -> Any:
        def make(*args: Any) -> Any:
            self.opened.append((kind, args))
            return rt.testing.ScriptedBackend(default=answer)

        return make


def answer(call: rt.testing.Call) -> Any:
    return 0 if call.kind == "select" else " the answer is 7"


@pytest.mark.parametrize("name", SHOWS)
def test_an_example_as_a_script(name, folder, monkeypatch, capsys):
    stand = Stand()
    for kind in ("Runtime", "RuntimeEndpoint"):
        monkeypatch.setattr(rt, kind, stand.of(kind), raising=False)
    script = str(folder / f"{name}.py")
    for arguments in ([], ["--backend", "tcp://127.0.0.1:1"]):
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        runpy.run_path(script, run_name="__main__")
        assert capsys.readouterr().out.strip()
    assert stand.opened == [("Runtime", ()), ("RuntimeEndpoint", ("tcp://127.0.0.1:1",))]
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(script, run_name="__main__")
    assert "--backend" in capsys.readouterr().out


@pytest.mark.parametrize(
    "test",
    [
        "test_only_a_complaint_gets_an_apology",
        "test_what_the_model_is_asked",
        "test_answers_in_order_of_the_calls",
        "test_an_error_of_the_backend_is_raised_where_the_value_is_read",
    ],
)
def test_the_tests_that_an_example_shows(test, example):
    module = example("unit_test")
    assert [name for name in vars(module) if name.startswith("test_")].count(test) == 1
    getattr(module, test)()
