"""Constraints without a model: compiling, masks a token, and what is let through that should not.

python benchmarks/structured.py --cases schemas.jsonl [--tokenizer FILE.tiktoken] [--out FILE.json]

A line of ``--cases`` is ``{"name", "schema", "tests": [{"data", "valid"}]}``, as in maskbench.
``--tokenizer``: a model (the default: SmolLM2, 49,152 ids) or a tiktoken file of byte tokens, then
padded to 151,936 ids as Qwen2's are.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from ramet.runtime.gateway.tokenizer import Tokenizer
from ramet.runtime.grammar import Compiler, Grammar, Spec, Vocabulary, llguidance_backend
from ramet.runtime.grammar.automaton_backend import AutomatonBackend
from ramet.runtime.grammar.backend import Refused
from ramet.runtime.grammar.llguidance_backend import LLGuidanceBackend
from ramet.runtime.grammar.outlines_backend import OutlinesBackend
from ramet.runtime.model.store import resolve
from ramet.runtime.protocol.errors import GrammarError
from report import Report

QWEN_WIDTH = 151_936
REGEXES = [
    r"[A-Z][a-z]+ [A-Z][a-z]+",
    r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z",
    r"[a-z0-9._]{1,20}@[a-z0-9]{1,20}\.(com|org|net)",
    r"((25[0-5]|2[0-4]\d|1\d{2}|[1-9]?\d)\.){3}(25[0-5]|2[0-4]\d|1\d{2}|[1-9]?\d)",
]
PLAIN = [r"[0-9]+", "(yes|no)", r".*", r"\w+ \w+", r"[a-z]{40}", r".{0,9}", *REGEXES]
"""What outlines-core takes as well, of them most."""
COUNTED = [r"[a-z ,.]{20000,}", r".{1,2000}", r"[^\n]{1,40}", r"[a-z]{3,700}", r"\w{1,20}"]
WORDS = [r"[a-z]{1,3000}", r"[a-z ,.]{1,3000}", r"[a-zA-Z0-9_]{1,3000}", r"[^,\n]{1,3000}"]


def vocabulary_of(name: str) -> Vocabulary:
    if not name.endswith(".tiktoken"):
        return Vocabulary.from_tokenizer(Tokenizer.from_files(resolve(name)))
    pairs = [line.split() for line in Path(name).read_bytes().splitlines() if line]
    tokens = [b""] * (len(pairs) + 1)
    for data, rank in pairs:
        tokens[int(rank)] = base64.b64decode(data)
    return Vocabulary(tokens, size=QWEN_WIDTH, eos_ids=[len(pairs)])


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def takes(grammar: Grammar, vocabulary: Vocabulary, text: str) -> bool:
    matcher = grammar.matcher()
    return all(map(matcher.accept, vocabulary.encode(text.encode()))) and matcher.can_end()


def walk(
    grammar: Grammar, vocabulary: Vocabulary, text: str, row: np.ndarray
) -> Iterator[tuple[float, int]]:
    """(seconds of a mask, the token taken after it) along a text, ours or the library's."""
    matcher = grammar.matcher()
    for token in vocabulary.encode(text.encode()):
        begun = time.perf_counter()
        matcher.fill(row)
        seconds = time.perf_counter() - begun
        if not matcher.accept(token):
            return
        yield seconds, token


def bare_walk(
    source: str, tokenizer: Any, vocabulary: Vocabulary, text: str, row: np.ndarray
) -> Iterator[float]:
    """The same by llguidance's own calls, with no check of its state."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, source, log_level=0)
    for token in vocabulary.encode(text.encode()):
        begun = time.perf_counter()
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        yield time.perf_counter() - begun
        if not matcher.consume_token(token):
            return


def compile_all(
    report: Report, cases: list[dict[str, Any]], vocabulary: Vocabulary, wide: bool
) -> list[tuple[dict[str, Any], Grammar]]:
    """Each schema alone, through a worker process, as a first request would meet it."""
    compiler = Compiler(vocabulary)
    compiler.submit(Spec("json_schema", '{"type":"null"}')).result()
    times, grammars, refused, unsound, right = [], [], 0, 0, 0
    for case in cases:
        begun = time.perf_counter()
        try:
            grammar = compiler.submit(Spec.of("json_schema", case["schema"])).result()
        except GrammarError as error:
            refused += 1
            print(f"  refused: {case['name']}: {str(error)[:90]}")
            continue
        finally:
            times.append((time.perf_counter() - begun) * 1e3)
        grammars.append((case, grammar))
        wrong = [
            test["valid"]
            for test in case["tests"]
            if takes(grammar, vocabulary, compact(test["data"])) != test["valid"]
        ]
        unsound += False in wrong
        right += not wrong
    compiler.close()
    report.row("compile, median", np.median(times), "ms", bar="≤ 25" if wide else "≤ 15")
    report.row("compile, 99th percentile", np.percentile(times, 99), "ms", bar="≤ 500")
    report.row("schemas that take an invalid instance", unsound, "", bar="0")
    share = 100 * right / len(cases)
    report.row("schemas all right", share, "%", bar="≥ 86", note=f"{refused} refused")
    return grammars


def masks(
    report: Report,
    grammars: list[tuple[dict[str, Any], Grammar]],
    vocabulary: Vocabulary,
    wide: bool,
) -> None:
    row = np.zeros(vocabulary.words, np.int32)
    texts = [
        (case, grammar, compact(test["data"]))
        for case, grammar in grammars
        for test in case["tests"]
        if test["valid"]
    ]
    cold, warm, bare = [], [], []
    backend = LLGuidanceBackend()
    tokenizer = backend._tokenizer(vocabulary)
    for case, grammar, text in texts:
        cold += [s for s, _ in walk(grammar, vocabulary, text, row)]
        warm += [s for s, _ in walk(grammar, vocabulary, text, row)]
        data = backend.try_in_worker(Spec.of("json_schema", case["schema"]), vocabulary)
        bare += list(bare_walk(data[8:].decode(), tokenizer, vocabulary, text, row))
    for name, times, bar in (("first walk", cold, ""), ("second walk", warm, "≤ 450")):
        micro = np.array(times) * 1e6
        first = ("≤ 20" if wide else "≤ 10") if bar else ""
        report.row(f"schema mask, {name}, median", np.median(micro), "µs", bar=first)
        report.row(f"schema mask, {name}, 99th pct", np.percentile(micro, 99), "µs", bar=bar)
    ratio = np.mean(cold) / np.mean(bare)
    report.row("mask time against llguidance's own loop", ratio, "×", bar="≤ 1.2")
    compiler = Compiler(vocabulary, deadline=60.0)
    regexes = [compiler.submit(Spec("regex", regex)).result() for regex in REGEXES]
    compiler.close()
    draw = random.Random(0)
    states = []
    times = []
    for i in range(256):
        matcher = (
            regexes[i % len(regexes)].matcher() if i % 2 else texts[i % len(texts)][1].matcher()
        )
        for _ in range(draw.randint(0, 12)):
            if matcher.is_done():
                break
            matcher.fill(row)
            ids = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            matcher.accept(int(draw.choice(ids[~np.isin(ids, vocabulary.eos_ids)].tolist() or [0])))
        states.append(matcher)
    rows = np.zeros((256, vocabulary.words), np.int32)
    for _ in range(5):
        begun = time.perf_counter()
        for matcher, line in zip(states, rows):
            matcher.fill(line)
        times.append((time.perf_counter() - begun) * 1e3)
    report.row("256 rows, regexes and schemas mixed", min(times), "ms", bar="≤ 2")
    times = []
    for matcher in states[1::2] * 4:
        begun = time.perf_counter()
        matcher.fill(row)
        times.append((time.perf_counter() - begun) * 1e6)
    report.row("regex mask, cached, median", np.median(times), "µs", bar="≤ 20" if wide else "≤ 10")


def automata(report: Report, vocabulary: Vocabulary) -> None:
    """Regexes by our automaton and by outlines-core's index."""
    ours, theirs = AutomatonBackend(), OutlinesBackend()
    for backend in (ours, theirs):  # each gets to know the vocabulary
        backend.compile(Spec("regex", "a"), vocabulary)
    seconds, sizes, refused = [], [], 0
    for text in (*PLAIN, *COUNTED):
        spec = Spec("regex", text)
        begun = time.perf_counter()
        grammar = ours.compile(spec, vocabulary)
        done = time.perf_counter()
        try:
            other = theirs.compile(spec, vocabulary)
        except Refused:
            refused += 1
            continue
        seconds.append((time.perf_counter() - done) / (done - begun))
        sizes.append(other.nbytes / grammar.nbytes)
    note = f"{min(seconds):.2g} to {max(seconds):.2g}; of {len(PLAIN) + len(COUNTED)} regexes"
    report.row("outlines-core's time to compile a regex, against ours", np.median(seconds), "×",
               note=f"{note}, {refused} refused there")  # fmt: skip
    note = f"{min(sizes):.2g} to {max(sizes):.2g}"
    report.row("outlines-core's memory for a regex, against ours", np.median(sizes), "×", note=note)


def sets_of_tokens(report: Report, vocabulary: Vocabulary) -> None:
    """Masks of llguidance in words, with our sets of tokens and with its own."""
    from llguidance import LLTokenizer

    ours, means = llguidance_backend._SLICES, []
    for slices in (ours, LLTokenizer.json_slices()):
        llguidance_backend._SLICES = slices
        backend, row = LLGuidanceBackend(), np.zeros(vocabulary.words, np.int32)
        for text in WORDS:
            draw, times = random.Random(1), []
            grammar = backend.compile(Spec("regex", text), vocabulary)
            for _ in range(8):
                matcher = grammar.matcher()
                for _ in range(25):
                    begun = time.perf_counter()
                    matcher.fill(row)
                    times.append(time.perf_counter() - begun)
                    allowed = np.unpackbits(row.view(np.uint8), bitorder="little")
                    allowed[list(vocabulary.eos_ids)] = 0
                    matcher.accept(int(draw.choice(np.flatnonzero(allowed))))
            means.append(np.mean(times[1:]))
    llguidance_backend._SLICES = ours
    ratios = [mine / own for mine, own in zip(means, means[len(WORDS) :])]
    report.row("masks of words by llguidance, with our sets against its own", np.median(ratios),
               "×", note=f"{min(ratios):.2g} to {max(ratios):.2g}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", required=True, help="JSON lines of schemas with instances")
    parser.add_argument("--tokenizer", default="smollm2-135m-instruct")
    parser.add_argument("--out", help="write JSON here")
    options = parser.parse_args()
    cases = [json.loads(line) for line in Path(options.cases).read_text().splitlines()]
    vocabulary = vocabulary_of(options.tokenizer)
    wide = vocabulary.size > 100_000
    report = Report("structured")
    report.row("ids of the vocabulary", vocabulary.size, "")
    grammars = compile_all(report, cases, vocabulary, wide)
    masks(report, grammars, vocabulary, wide)
    automata(report, vocabulary)
    sets_of_tokens(report, vocabulary)
    report.write(options.out)


if __name__ == "__main__":
    main()
