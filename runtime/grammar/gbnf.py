"""Grammars in GBNF (llama.cpp's dialect of EBNF), read into rules.

``root ::= "a" rule [0-9]+ | ( "b" )? .{2,3}``, comments from ``#``; a newline ends a rule only
where another begins. ``.`` is any character.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ..protocol.errors import GrammarError
from .charset import ANY, complement, ranges_of
from .regex_tree import Chars, Tree, literal

MAX_RULES = 5_000
MAX_REPEAT = 10_000
MAX_DEPTH = 100
MAX_SIGNS = 4
"""Repeats right behind each other, as in ``a?*``."""


@dataclass(frozen=True)
class Ref:
    """Another rule, by name."""

    name: str


@dataclass(frozen=True)
class Seq:
    """One part after the other."""

    parts: tuple[Expr, ...]


@dataclass(frozen=True)
class Alt:
    """Any one of the parts."""

    parts: tuple[Expr, ...]


@dataclass(frozen=True)
class Rep:
    """``low`` to ``high`` times the body; no ``high``: without end."""

    body: Expr
    low: int
    high: int | None


Expr = Ref | Seq | Alt | Rep | Tree
"""A `Tree` where no rule is named within."""

Rules = dict[str, Expr]

_TOKEN = re.compile(
    r"""
    (?P<skip>[ \t\r\n]+ | \#[^\n]*)
  | (?P<name>[A-Za-z0-9_][A-Za-z0-9_-]*)
  | (?P<define>::=)
  | (?P<text>"(?:[^"\\]|\\.)*")
  | (?P<set>\[(?:[^\]\\]|\\.)*\])
  | (?P<times>\{[^}]*\})
  | (?P<sign>[()|*+?.])
    """,
    re.VERBOSE | re.DOTALL,
)
_TIMES = re.compile(r"\{\s*(\d+)\s*(,\s*(\d+)?\s*)?\}")
_ESCAPE = re.compile(
    r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))|(.)", re.DOTALL
)
_SIGNS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_PLAIN = {"n": "\n", "r": "\r", "t": "\t", "0": "\0"}
_LITERAL = frozenset("\\\"'[]-^/")


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    at: int


def parse_gbnf(text: str) -> Rules:
    """The rules of a grammar, in order. Raises `GrammarError` with line and column."""
    return _Parser(text).rules()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(self._cut())
        self._next = 0

    def rules(self) -> Rules:
        found: Rules = {}
        while self._next < len(self._tokens):
            name = self._tokens[self._next]
            if not self._starts_rule():
                raise self._error("a rule is expected, such as: name ::= …", name.at)
            if name.text in found:
                raise self._error(f"the rule {_short(name.text)} is defined twice", name.at)
            if len(found) >= MAX_RULES:
                raise GrammarError(f"the grammar has over {MAX_RULES} rules")
            self._next += 2
            found[name.text] = self._alternatives(0)
        if not found:
            raise GrammarError("the grammar has no rule")
        return found

    def _cut(self) -> Iterator[_Token]:
        at = 0
        while at < len(self._text):
            match = _TOKEN.match(self._text, at)
            if match is None:
                raise self._error(f"unexpected {self._text[at]!r}", at)
            kind = match.lastgroup or ""
            if kind != "skip":
                yield _Token(kind, match[0], at)
            at = match.end()

    def _starts_rule(self) -> bool:
        two = self._tokens[self._next : self._next + 2]
        return [token.kind for token in two] == ["name", "define"]

    def _alternatives(self, depth: int) -> Expr:
        if depth > MAX_DEPTH:
            raise GrammarError(f"the grammar nests over {MAX_DEPTH} groups")
        parts = [self._sequence(depth)]
        while self._is("|"):
            self._next += 1
            parts.append(self._sequence(depth))
        return parts[0] if len(parts) == 1 else Alt(tuple(parts))

    def _sequence(self, depth: int) -> Expr:
        parts: list[Expr] = []
        while self._next < len(self._tokens) and not self._starts_rule():
            if self._is("|") or self._is(")"):
                break
            parts.append(self._repeated(self._atom(depth)))
        return parts[0] if len(parts) == 1 else Seq(tuple(parts))

    def _atom(self, depth: int) -> Expr:
        token = self._tokens[self._next]
        self._next += 1
        if token.kind == "name":
            return Ref(token.text)
        if token.kind == "text":
            return literal("".join(c for c, _ in self._characters(token)))
        if token.kind == "set":
            return self._set(token)
        if token.text == ".":
            return Chars(ANY)
        if token.text == "(":
            inner = self._alternatives(depth + 1)
            if not self._is(")"):
                raise self._error("a group that begins here has no end", token.at)
            self._next += 1
            return inner
        raise self._error(f"unexpected {_short(token.text)}", token.at)

    def _repeated(self, expr: Expr) -> Expr:
        for _ in range(MAX_SIGNS):
            if self._next >= len(self._tokens):
                return expr
            token = self._tokens[self._next]
            bounds = self._times(token) if token.kind == "times" else _SIGNS.get(token.text)
            if bounds is None:
                return expr
            self._next += 1
            expr = Rep(expr, *bounds)
        raise self._error("too many repeats of one thing", self._tokens[self._next - 1].at)

    def _times(self, token: _Token) -> tuple[int, int | None]:
        match = _TIMES.fullmatch(token.text)
        if match is None or len(token.text) > 40:
            raise self._error("a repeat is {n}, {n,} or {n,m}", token.at)
        low = int(match[1])
        high = low if match[2] is None else None if match[3] is None else int(match[3])
        if max(low, high or 0) > MAX_REPEAT:
            raise self._error(f"a repeat is over {MAX_REPEAT}", token.at)
        if high is not None and high < low:
            raise self._error("a repeat ends before it begins", token.at)
        return low, high

    def _set(self, token: _Token) -> Chars:
        body = self._characters(token)
        negated = bool(body) and body[0] == ("^", False)
        body = body[1:] if negated else body
        pairs: list[tuple[int, int]] = []
        at = 0
        while at < len(body):
            first = last = ord(body[at][0])
            if at + 2 < len(body) and body[at + 1] == ("-", False):
                last = ord(body[at + 2][0])
                at += 2
            if last < first:
                raise self._error("a range ends before it begins", token.at)
            pairs.append((first, last))
            at += 1
        ranges = ranges_of(pairs)
        ranges = complement(ranges) if negated else ranges
        if not ranges:
            raise self._error("a set without any character", token.at)
        return Chars(ranges)

    def _characters(self, token: _Token) -> list[tuple[str, bool]]:
        """(character, whether it was escaped) of what is between the delimiters."""
        found: list[tuple[str, bool]] = []
        for match in _ESCAPE.finditer(token.text[1:-1]):
            two, four, eight, other, plain = match.groups()
            if plain is not None:
                found.append((plain, False))
            elif other is not None:
                if other not in _PLAIN and other not in _LITERAL:
                    raise self._error(f"unknown escape \\{other}", token.at + 1 + match.start())
                found.append((_PLAIN.get(other, other), True))
            else:
                point = int(two or four or eight, 16)
                if point > 0x10FFFF or 0xD800 <= point <= 0xDFFF:
                    raise self._error("not a character", token.at + 1 + match.start())
                found.append((chr(point), True))
        return found

    def _is(self, sign: str) -> bool:
        if self._next >= len(self._tokens):
            return False
        token = self._tokens[self._next]
        return token.kind == "sign" and token.text == sign

    def _error(self, message: str, at: int) -> GrammarError:
        line = self._text.count("\n", 0, at) + 1
        column = at - self._text.rfind("\n", 0, at)
        return GrammarError(message, where=f"line {line}, column {column}")


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:59] + "…")
