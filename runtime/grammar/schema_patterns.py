r"""Patterns of a schema, as llguidance must be given them.

Classes mean what they mean in JavaScript and Python: an inner ``[``, ``&&``, ``--`` and ``~~`` are
characters, and no operations on sets. And they are without the character NUL: where one set has all
32 control characters, llguidance lets ``\"`` and ``\\`` through as escaped spellings of them, and
``[^"]`` would take a quote. No such set is left when classes do without the first of these.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ..protocol.errors import GrammarError
from .schema_document import Node, pointer

_PLAIN = re.compile(
    r"""\[(?: [0-9A-Za-z !"#$%'()*+,./:;<=>?@_`{|}] | \\[dws.+*/?$(){}|"_-] | - )*\]""", re.VERBOSE
)
"""A class in which no set of control characters can be, other than white space."""
_ALL = re.compile(r"\[(?:\\s\\S|\\S\\s|\\d\\D|\\D\\d|\\w\\W|\\W\\w)\]")
_PROPERTY = re.compile(r"\\[pP](?:\{[^{}]*\}|[A-Za-z])")
_NUL = re.compile(r"\\(?:x00|u0000|U0{8}|[xuU]\{0+\}|c@|0)|\0")
_VERBOSE = re.compile(r"(?<!\\)\(\?[a-zA-Z]*x")
_CLASS = re.compile(r"\[\^?\]?(?:[^\]\\]|\\.)*\]", re.DOTALL)
"""A ``]`` that comes first is a character of the class."""
_ESCAPE = re.compile(
    r"\\(?:[xuUpP]\{[^{}]*\}|c[A-Za-z]"
    r"|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|.)",
    re.DOTALL,
)
_PIECE = re.compile(
    rf"{_ESCAPE.pattern}|{_CLASS.pattern}?|\{{(?:(?:[0-9]+(?:,[0-9]*)?|,[0-9]*)\}})?", re.DOTALL
)
"""What is written otherwise in JavaScript: a brace that counts nothing is a character there. (So is
that of ``{,2}``, which counts in Python: it is left to the library, which refuses it.) A class
without an end goes on to that of the pattern, or each bracket in it would be looked at so."""
_MORE = "^(?!^[-+.]*$)"
_SPECIAL = frozenset("[]&-~")


def lower_decimals(nodes: Iterable[Node]) -> None:
    """Say in place what pydantic's patterns of decimals begin with, a look-ahead by which there is
    more than signs and points, as a pattern of its own."""
    for node in nodes:
        pattern = node.schema.get("pattern") if isinstance(node.schema, dict) else None
        if isinstance(pattern, str) and pattern.startswith(_MORE) and "|" not in pattern:
            assert isinstance(node.schema, dict)
            node.schema["pattern"] = "^" + pattern[len(_MORE) :]
            node.schema["allOf"] = [*node.schema.get("allOf", ()), {"pattern": "[^-+.]"}]


def lower_patterns(node: Node, path: str) -> None:
    """Rewrite the patterns of a subschema in place. Raises `GrammarError` for one that asks for NUL
    by itself."""
    schema = node.schema
    if not isinstance(schema, dict):
        return
    if "pattern" in schema:
        schema["pattern"] = lower_pattern(schema["pattern"], pointer(path, "pattern"))
    if schema.get("patternProperties"):
        patterns: dict[str, Any] = {}
        for name, item in schema["patternProperties"].items():
            patterns[lower_pattern(name, pointer(path, "patternProperties", name))] = item
        schema["patternProperties"] = patterns


def lower_pattern(pattern: str, where: str) -> str:
    """The same pattern in the library's dialect, with plain classes that do without NUL."""
    pattern = _PIECE.sub(lambda found: _of_javascript(found[0]), pattern)
    if "[" not in pattern and not _PROPERTY.search(pattern):
        return pattern
    if _VERBOSE.search(pattern):
        raise GrammarError("(?x) is not supported in a pattern", where=where)
    parts: list[str] = []
    at = 0
    while at < len(pattern):
        after = _after(pattern, at)
        part = pattern[at:after]
        if _NUL.fullmatch(part):
            raise GrammarError("the character NUL is not supported in a pattern", where=where)
        if _CLASS.fullmatch(part):
            plain = _PLAIN.fullmatch(part) and "--" not in part
            if not plain and not _ALL.fullmatch(part):
                part = f"[{_literal(part)}&&[^\\x00]]"
        elif _PROPERTY.fullmatch(part):
            part = f"[{part}&&[^\\x00]]"
        parts.append(part)
        at = after
    return "".join(parts)


def _of_javascript(piece: str) -> str:
    """A class, an escape or an opening brace as the library writes it."""
    if piece[0] == "[":
        inner = _ESCAPE.sub(lambda found: _of_javascript(found[0]), piece)
        return re.sub(r"\\.", lambda found: r"\x08" if found[0] == r"\b" else found[0], inner)
    if piece[:2] == r"\c" and len(piece) == 3:
        return f"\\x{ord(piece[2]) & 31:02x}"
    if piece[:2] == r"\u" and len(piece) == 12:
        pair = (int(piece[2:6], 16) << 10) + int(piece[8:12], 16) - 0x35FDC00
        return f"\\x{{{pair:x}}}"
    if piece in (r"\<", r"\>"):  # not the edges of a word
        return piece[1]
    return r"\{" if piece == "{" else piece


def _after(pattern: str, at: int) -> int:
    """Where what begins at a place ends: a class, an escape, or one character."""
    if pattern[at] == "\\":
        found = _PROPERTY.match(pattern, at) or _NUL.match(pattern, at)
        return found.end() if found else at + 2
    if pattern[at] != "[":
        return at + 1
    found = _CLASS.match(pattern, at)
    return found.end() if found else len(pattern)  # without an end: the backend says so


def _literal(part: str) -> str:
    """A class in which nothing can be an operation on sets."""
    at = 2 if part[1] == "^" else 1
    end = len(part) - 1
    parts = [part[:at]]
    while at < end:
        at = _character(part, at, parts)
        if part[at] == "-" and at + 1 < end:
            parts.append("-")
            at = _character(part, at + 1, parts)
    return "".join([*parts, "]"])


def _character(part: str, at: int, parts: list[str]) -> int:
    """Add the character at a place, or the beginning of an escape; the place after."""
    after = at + 2 if part[at] == "\\" else at + 1
    parts.append(part[at:after] if part[at] not in _SPECIAL else "\\" + part[at])
    return after
