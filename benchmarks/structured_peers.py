"""Constraints side by side: ours, llguidance's own loop, xgrammar's own loop, on the same cases.

    python benchmarks/structured_peers.py --cases FILE [FILE …] [--tokenizer FILE.tiktoken]
    [--xgrammar PYTHON] [--deadline 30] [--only ramet llguidance] [--out FILE.json]

``--cases``: JSON lines, as in maskbench (``{"name", "schema", "tests": [{"data", "valid"}]}``) or
``{"id", "kind", "spec", "valid": [texts], "invalid": [texts], "expect"}``. Each library runs in a
process of its own, by ``--xgrammar`` for xgrammar, which needs torch: the path of a Python that has
it. They take turns case by case. One that does not answer by the deadline, or dies, is started
anew. Mask times are of the texts that all of them take, along the same tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from report import Report
from structured import compact, vocabulary_of
from structured_sides import SIDES

SCRIPT = Path(__file__).parent / "structured_sides.py"


class Process:
    """A library in its process."""

    def __init__(self, name: str, python: str, tokens: Path, deadline: float) -> None:
        self.name = name
        self._deadline = deadline
        self._command = [
            python, str(SCRIPT), "--side", name, "--tokens", str(tokens),
            "--deadline", str(deadline),
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def _start(self) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, env={**environment, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        reply = self._line(120.0)
        if reply is None:
            raise SystemExit(f"{self.name} could not be started: {' '.join(self._command)}")
        self.version: str = reply["version"]

    def ask(self, case: dict[str, Any]) -> dict[str, Any]:
        """What came of a case: an answer, or ``hang`` or ``crash``."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        process.stdin.write(json.dumps(case).encode() + b"\n")
        process.stdin.flush()
        begun = time.monotonic()
        reply = self._line(self._deadline + 2.0)  # ours has a deadline of its own
        if reply is None:
            late = time.monotonic() - begun > self._deadline
            self.close()
            self._start()
            reply = {"hang" if late else "crash": True}
        return reply

    def _line(self, seconds: float) -> dict[str, Any] | None:
        assert self._process is not None
        assert self._process.stdout is not None
        until = time.monotonic() + seconds
        data = b""
        while not data.endswith(b"\n"):
            left = until - time.monotonic()
            if not select.select([self._process.stdout], [], [], max(left, 0))[0]:
                return None
            part = os.read(self._process.stdout.fileno(), 1 << 20)
            if not part:
                return None
            data += part
        return json.loads(data)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def read_cases(path: Path) -> list[dict[str, Any]]:
    """The cases of a file in one form."""
    cases = []
    for line in path.read_text().splitlines():
        given = json.loads(line)
        if "schema" in given:
            texts = {
                word: [compact(t["data"]) for t in given["tests"] if t["valid"] is valid]
                for word, valid in (("valid", True), ("invalid", False))
            }
            given = {"id": given["name"], "kind": "json_schema", "spec": given["schema"], **texts}
        if not isinstance(given["spec"], str):
            given["spec"] = json.dumps(given["spec"], ensure_ascii=False)
        cases.append({"expect": "ok", **given})
    return cases


def verdict(case: dict[str, Any], reply: dict[str, Any]) -> str:
    """hang, crash, failed, refused, unsound, strict, accepted (what should be refused), right."""
    for word in ("hang", "crash"):
        if word in reply:
            return word
    if "error" in reply:
        return "right" if case["expect"] == "clear_error" else "refused"
    if "failed" in reply:
        return "failed"
    if any(reply["invalid"]):
        return "unsound"
    if not all(reply["valid"]):
        return "strict"
    bare = not case["valid"] and not case["invalid"]
    return "accepted" if case["expect"] == "clear_error" and bare else "right"


VERDICTS = {
    "right": "are all right",
    "unsound": "take what is invalid",
    "accepted": "take a spec that is wrong",
    "strict": "refuse a valid text",
    "refused": "refuse the spec",
    "failed": "fail while masking",
    "hang": "do not end",
    "crash": "die",
}


def judge(
    report: Report, name: str, cases: list[dict[str, Any]], replies: dict[str, list[dict[str, Any]]]
) -> None:
    """Rows of one file of cases: what came of them, side by side."""
    for side, given in replies.items():
        found = [verdict(case, reply) for case, reply in zip(cases, given)]
        for word, what in VERDICTS.items():
            count = found.count(word)
            if count or word in ("right", "unsound", "strict", "refused", "hang"):
                report.row(f"{name}, {side}: cases that {what}", count, f"of {len(cases)}")
        for word, valid in (("valid", True), ("invalid", False)):
            taken = [ok for reply in given for ok in reply.get(word, ())]
            if taken:
                share = f"of {len(taken)}"
                what = f"{name}, {side}: {word} texts that are {'taken' if valid else 'refused'}"
                report.row(what, sum(ok is valid for ok in taken), share)
        compiled = [reply["compile_ms"] for reply in given if "compile_ms" in reply]
        for percent in (50, 99):
            report.row(
                f"{name}, {side}: compile, p{percent}", float(np.percentile(compiled, percent)),
                "ms",
            )  # fmt: skip


def mask_times(
    report: Report, name: str, replies: dict[str, list[dict[str, Any]]], bar: float
) -> None:
    """Times of the walks that every side finished; ours against the fastest."""
    walks: dict[str, list[list[float]]] = {side: [[], []] for side in replies}
    common = 0
    for row in zip(*replies.values()):
        for texts in zip(*(reply.get("masks", ()) for reply in row)):
            if all(walk is not None for text in texts for walk in text):
                common += 1
                for side, text in zip(replies, texts):
                    for found, walk in zip(walks[side], text):
                        found.extend(walk)
    for at, which in enumerate(("first walk", "second walk")):
        means = {}
        for side in replies:
            micro = np.array(walks[side][at] or [float("nan")])
            means[side] = float(micro.mean())
            note = f"{common} texts, {len(micro)} masks" if side == next(iter(replies)) else ""
            what = f"{name}, {side}: mask, {which}"
            report.row(f"{what}, p50", float(np.median(micro)), "µs", note=note)
            report.row(f"{what}, p99", float(np.percentile(micro, 99)), "µs")
            report.row(f"{what}, mean", means[side], "µs")
        if "ramet" in means and len(means) > 1:
            others = {side: mean for side, mean in means.items() if side != "ramet"}
            best = min(others, key=others.__getitem__)
            report.row(
                f"{name}: mask, {which}, ours / the fastest other", means["ramet"] / others[best],
                "×", bar=f"≤ {bar}", note=f"mean, against {best}",
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", required=True, nargs="+", type=Path)
    parser.add_argument("--tokenizer", default="smollm2-135m-instruct")
    parser.add_argument("--xgrammar", metavar="PYTHON", help="a Python that has xgrammar")
    parser.add_argument("--deadline", type=float, default=30.0, help="seconds a case may take")
    parser.add_argument("--only", nargs="+", choices=SIDES, help="default: all there are")
    parser.add_argument("--out", help="write JSON here")
    parser.add_argument("--raw", type=Path, help="write every reply here")
    options = parser.parse_args()
    names = options.only or [
        name for name in SIDES if options.xgrammar or not name.startswith("xgrammar")
    ]
    vocabulary = vocabulary_of(options.tokenizer)
    report = Report("structured, side by side")
    report.row("ids of the vocabulary", vocabulary.size, "")
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens.json"
        table = [data.hex() for data in vocabulary.tokens]
        tokens.write_text(
            json.dumps(
                {"name": options.tokenizer, "tokens": table, "ends": list(vocabulary.eos_ids)}
            )
        )
        sides = [
            Process(
                name,
                options.xgrammar if name.startswith("xgrammar") else sys.executable,
                tokens,
                options.deadline,
            )
            for name in names
        ]
        report.versions |= {side.name.split(",")[0]: side.version for side in sides}
        warm = {"kind": "json_schema", "spec": "true", "valid": ["null"], "invalid": []}
        for side in sides:
            side.ask({**warm, "valid_ids": [vocabulary.encode(b"null")]})
        for path in options.cases:
            cases = read_cases(path)
            replies: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
            for case in cases:
                ids = [vocabulary.encode(text.encode()) for text in case["valid"]]
                for side in sides:
                    reply = side.ask({**case, "valid_ids": ids})
                    replies[side.name].append(reply)
                    if verdict(case, reply) != "right":
                        print(
                            f"  {case['id']}, {side.name}: {verdict(case, reply)} "
                            f"{reply.get('error') or reply.get('failed') or ''}"[:160],
                            flush=True,
                        )
            judge(report, path.stem, cases, replies)
            mask_times(report, path.stem, replies, 1.2)
            if options.raw:
                options.raw.write_text(json.dumps(replies))
        for side in sides:
            side.close()
    report.write(options.out)


if __name__ == "__main__":
    main()
