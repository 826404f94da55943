"""How libraries are judged beside each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
CASES = [
    {"name": "open", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
     "tests": [{"data": {"a": 1}, "valid": True}, {"data": {"a": "x"}, "valid": False}]},
    {"id": "words", "kind": "regex", "spec": "(yes|no)", "valid": ["yes"], "invalid": ["maybe"],
     "expect": "ok"},
    {"id": "wrong", "kind": "json_schema", "spec": {"type": "strin"}, "valid": [], "invalid": [],
     "expect": "clear_error"},
]  # fmt: skip


class Letters:
    """Tokens "a", "b", "ab" and an end; texts of "ab" repeated, cut as the masks say."""

    table = (b"a", b"b", b"ab", b"")
    ends = (3,)
    ids = {b"a": 0, b"b": 1, b"ab": 2}  # noqa: RUF012
    longest = 2

    def __init__(self, allowed: list[set[int]]) -> None:
        self.allowed = allowed
        self.at = 0
        self.taken: list[int] = []

    def fill(self, row: np.ndarray) -> None:
        row[0, 0] = sum(1 << token for token in self.allowed[self.at])

    def accept(self, token: int) -> bool:
        assert token in self.allowed[self.at]
        self.taken.append(token)
        self.at += 1
        return True


@pytest.mark.parametrize(
    ("allowed", "text", "right", "tokens"),
    [
        ([{0, 2}, {3}], b"ab", True, [2]),
        ([{0}, {1}, {3}], b"ab", True, [0, 1]),
        ([{2}, {2}], b"ab", False, [2]),
        ([{0}, {3}], b"ab", False, [0]),
        ([{3}], b"", True, []),
    ],
    ids=["longest", "as the masks say", "may not end", "cannot go on", "empty"],
)
def test_a_text_is_written_as_masks_allow(bench_module, allowed, text, right, tokens):
    sides = bench_module("structured_sides")
    walker = Letters(allowed)
    row = np.zeros((1, 1), np.int32)
    assert sides.writes(walker, walker, text, row) is right
    assert walker.taken == tokens


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ({"hang": True}, "hang"),
        ({"crash": True}, "crash"),
        ({"error": "no"}, "refused"),
        ({"compile_ms": 1.0, "failed": "no"}, "failed"),
        ({"valid": [True], "invalid": [True]}, "unsound"),
        ({"valid": [False], "invalid": [False]}, "strict"),
        ({"valid": [True], "invalid": [False]}, "right"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_verdicts(bench_module, reply, verdict):
    case = {"expect": "ok", "valid": ["a"], "invalid": ["b"]}
    assert bench_module("structured_peers").verdict(case, reply) == verdict


def test_a_wrong_spec_must_be_refused(bench_module):
    verdict = bench_module("structured_peers").verdict
    case = {"expect": "clear_error", "valid": [], "invalid": []}
    assert verdict(case, {"error": "no"}) == "right"
    assert verdict(case, {"valid": [], "invalid": []}) == "accepted"
    case = {**case, "valid": ["a"]}
    assert verdict(case, {"valid": [True], "invalid": []}) == "right"


def test_one_command_compares_them(tmp_path):
    cases = tmp_path / "cases.jsonl"
    cases.write_text("\n".join(map(json.dumps, CASES)))
    out = tmp_path / "out.json"
    command = [
        *(sys.executable, "structured_peers.py", "--cases", str(cases), "--out", str(out)),
        *("--only", "ramet", "llguidance"),
    ]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
    subprocess.run(command, cwd=FOLDER, env=environment, check=True, timeout=120)
    report = json.loads(out.read_text())
    rows = {row["work"]: row["value"] for row in report["rows"]}
    for side in ("ramet", "llguidance"):
        assert rows[f"cases, {side}: cases that are all right"] == 3
        assert rows[f"cases, {side}: invalid texts that are refused"] == 2
        assert rows[f"cases, {side}: mask, first walk, p50"] > 0
    assert report["versions"]["llguidance"]
    assert str(tmp_path) not in out.read_text()
