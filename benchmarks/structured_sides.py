"""One library under test: a process that compiles a case a line and answers with a line.

Started by `structured_peers.py`, each library by a Python that has it. What is asked of all is the
same: a text counts as taken where the masks let it be written token by token, the longest token
that is allowed each time, and then let the output end.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np

MEMORY = 8 << 30


class Walker(Protocol):
    """One output on its way."""

    def fill(self, row: np.ndarray) -> None:
        """[1, words] int32, a bit a token."""
        ...

    def accept(self, token: int) -> bool: ...


class Side(Protocol):
    """A library. ``compile`` makes something, or raises; `walker` starts an output."""

    version: str

    def compile(self, kind: str, spec: str) -> Any: ...

    def walker(self, grammar: Any) -> Walker: ...


class Tokens:
    """Bytes of every id, from a file: [size] hex strings, and the ids that end an answer."""

    def __init__(self, path: Path) -> None:
        data = json.loads(path.read_text())
        self.name: str = data["name"]
        self.table = [bytes.fromhex(token) for token in data["tokens"]]
        self.ends: list[int] = data["ends"]
        self.words = (len(self.table) + 31) // 32
        self.ids: dict[bytes, int] = {}
        for number, token in enumerate(self.table):
            if token and number not in self.ends:
                self.ids.setdefault(token, number)
        self.longest = max(map(len, self.ids))


class Ramet:
    """As a user's request is compiled: checked, tried in a worker, made in this process."""

    def __init__(self, tokens: Tokens, deadline: float) -> None:
        from ramet import __version__
        from ramet.runtime.grammar import Compiler
        from structured import vocabulary_of

        self.version = __version__
        self._compiler = Compiler(vocabulary_of(tokens.name), deadline=deadline)

    def compile(self, kind: str, spec: str) -> Any:
        from ramet.runtime.grammar import Spec

        return self._compiler.submit(Spec.of(kind, spec)).result()

    def walker(self, grammar: Any) -> Walker:
        return _RametWalker(grammar.matcher())


class _RametWalker:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self.accept = matcher.accept

    def fill(self, row: np.ndarray) -> None:
        self._matcher.fill(row[0])


class LLGuidance:
    """Its own calls with its own defaults, JSON compact."""

    def __init__(self, tokens: Tokens, deadline: float) -> None:
        import importlib.metadata

        from llguidance import LLTokenizer, TokenizerWrapper

        del deadline
        self.version = importlib.metadata.version("llguidance")
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(_Wrapped(tokens)), n_vocab=len(tokens.table), eos_token=tokens.ends
        )

    def compile(self, kind: str, spec: str) -> Any:
        from llguidance import LLMatcher
        from llguidance.gbnf_to_lark import any_to_lark

        if kind == "json_schema":
            source = LLMatcher.grammar_from_json_schema(spec, overrides={"whitespace_flexible": False})  # fmt: skip # type: ignore[arg-type] # noqa: E501
        elif kind == "regex":
            source = LLMatcher.grammar_from_regex(spec)
        else:
            source = LLMatcher.grammar_from_lark(any_to_lark(spec))
        self.walker(source)
        return source

    def walker(self, grammar: Any) -> Walker:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return _LLGuidanceWalker(matcher)


class _Wrapped:
    def __init__(self, tokens: Tokens) -> None:
        from structured import vocabulary_of

        self._vocabulary = vocabulary_of(tokens.name)
        self.tokens = tokens.table
        self.eos_token_id = tokens.ends[0]
        self.bos_token_id = None
        self.special_token_ids: list[int] = []

    def __call__(self, text: bytes | str) -> list[int]:
        return self._vocabulary.encode(text.encode() if isinstance(text, str) else text)


class _LLGuidanceWalker:
    def __init__(self, matcher: Any) -> None:
        from llguidance.numpy import fill_next_token_bitmask

        self._fill = fill_next_token_bitmask
        self._matcher = matcher
        self.accept = matcher.consume_token

    def fill(self, row: np.ndarray) -> None:
        self._fill(self._matcher, row)


class XGrammar:
    """Its own calls, JSON compact; ``strict`` is its default, and closes objects."""

    strict = True

    def __init__(self, tokens: Tokens, deadline: float) -> None:
        import importlib.metadata

        import xgrammar  # type: ignore[import-not-found]

        del deadline
        self.version = importlib.metadata.version("xgrammar")
        self._library = xgrammar
        info = xgrammar.TokenizerInfo(
            tokens.table, vocab_size=len(tokens.table), stop_token_ids=tokens.ends
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, kind: str, spec: str) -> Any:
        if kind == "json_schema":
            return self._compiler.compile_json_schema(
                spec, any_whitespace=False, separators=(",", ":"), strict_mode=self.strict
            )
        if kind == "regex":
            return self._compiler.compile_regex(spec)
        return self._compiler.compile_grammar(spec)

    def walker(self, grammar: Any) -> Walker:
        return _XGrammarWalker(self._library.GrammarMatcher(grammar))


class _XGrammarWalker:
    def __init__(self, matcher: Any) -> None:
        self.fill = matcher.fill_next_token_bitmask
        self.accept = matcher.accept_token


class XGrammarOpen(XGrammar):
    """With undeclared members allowed, as the standard has it."""

    strict = False


SIDES: dict[str, type[Side]] = {
    "ramet": Ramet,
    "llguidance": LLGuidance,
    "xgrammar": XGrammar,
    "xgrammar, not strict": XGrammarOpen,
}


def writes(walker: Walker, tokens: Tokens, text: bytes, row: np.ndarray) -> bool:
    """Whether masks let a text be written and end there."""
    at = 0
    while at < len(text):
        walker.fill(row)
        bits = row[0].view(np.uint8)
        for length in range(min(tokens.longest, len(text) - at), 0, -1):
            token = tokens.ids.get(text[at : at + length])
            if token is not None and bits[token >> 3] >> (token & 7) & 1:
                break
        else:
            return False
        if not walker.accept(token):
            return False
        at += length
    walker.fill(row)
    bits = row[0].view(np.uint8)
    return any(bits[end >> 3] >> (end & 7) & 1 for end in tokens.ends)


def times(walker: Walker, ids: list[int], row: np.ndarray) -> list[float] | None:
    """Microseconds of the mask before each token; None where one is not taken."""
    found = []
    for token in ids:
        begun = time.perf_counter()
        walker.fill(row)
        found.append((time.perf_counter() - begun) * 1e6)
        if not walker.accept(token):
            return None
    return found


def answer(side: Side, tokens: Tokens, case: dict[str, Any]) -> dict[str, Any]:
    """What came of one case. ``masks``: for each valid text its first and its second walk."""
    row = np.zeros((1, tokens.words), np.int32)
    begun = time.perf_counter()
    try:
        grammar = side.compile(case["kind"], case["spec"])
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:200]}
    result: dict[str, Any] = {"compile_ms": (time.perf_counter() - begun) * 1e3}
    try:
        walks = [
            [times(side.walker(grammar), ids, row) for ids in case["valid_ids"]] for _ in range(2)
        ]
        result["masks"] = list(zip(*walks))
        for kind in ("valid", "invalid"):
            result[kind] = [
                writes(side.walker(grammar), tokens, text.encode(), row) for text in case[kind]
            ]
    except Exception as error:
        result["failed"] = f"{type(error).__name__}: {error}"[:200]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", required=True, choices=SIDES)
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--deadline", type=float, required=True)
    options = parser.parse_args()
    replies = sys.stdout
    sys.stdout = sys.stderr  # what a library prints is no reply
    tokens = Tokens(options.tokens)
    side = SIDES[options.side](tokens, options.deadline)  # type: ignore[call-arg]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    gc.collect()
    gc.freeze()
    print(json.dumps({"version": side.version}), file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(side, tokens, json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    main()
