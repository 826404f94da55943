"""Patterns of schemas: classes mean what they mean in Python, and let no quote slip through."""

from __future__ import annotations

import json
import re
import warnings

import pytest
from ramet.runtime.grammar.schema_patterns import lower_pattern
from ramet.runtime.protocol.errors import GrammarError

CLASSES = [
    *(
        r'[^"]',
        r'[^"\\]',
        r"[^\\]",
        r"[^a-z]",
        r'[^\s"]',
        r'[^\w"]',
        r"[\x00-\x1f]",
        r"[\x01-\x1f]",
    ),
    *(r"[\x00-!]", r"[\s\S]", r"[^]]", r"[]a]", r"[\n\t]", r"(?:[^\"\n]|\n)", r'(?:[^"]|x)'),
    *(r"(?:[\x00-\x0f]|[\x10-\x1f])", r"[[a]", r"[a&&b]", r"[a-z--b]", r"[a~~b]", r"[[:alpha:]]"),
    *(r"\[[^\[]\]", r"[+-]", r"[+--]", r"[\\]\\[[]", r"\(?x[^x]", r"[^\u0041]", r"[a-f0-9]"),
]
TEXTS = [
    *('"', "\\", "\n", "\t", "\x01", "\x1f", " ", "a", "b", "x", "A", "0", "-", "&", "~", "[", "]"),
    *(
        ":",
        ":]",
        "a]",
        "+",
        ",",
        "é",
        "😀",
        "[a]",
        '["]',
        "xa",
        '"a',
        "\\\\[",
        "(x1",
        '(x"',
        "u",
        "n",
    ),
]


@pytest.mark.parametrize("chars", CLASSES)
@pytest.mark.parametrize("form", ["^{}$", "^(?:{})*$"])
def test_a_class_takes_what_it_takes_in_python(schemas, chars, form):
    pattern = form.format(chars)
    grammar = schemas.compile({"type": "string", "pattern": pattern})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        oracle = re.compile(f"(?a:{pattern[1:-1]})")
    for text in TEXTS:
        spelled = {json.dumps(text), json.dumps(text, ensure_ascii=False)}
        spelled.add('"' + "".join(f"\\u{ord(c):04x}" for c in text if ord(c) < 65536) + '"')
        taken = any(schemas.takes(grammar, form) for form in spelled if json.loads(form) == text)
        assert taken == (oracle.fullmatch(text) is not None), (pattern, text)


def test_what_is_plain_stays_as_it_is():
    for pattern in ("^[a-z0-9_-]+$", r"\[x\]", "^[A-Z][a-z]*( [A-Z])?$", r"[\s\S]*", "[unclosed"):
        assert lower_pattern(pattern, "#") == pattern


@pytest.mark.parametrize("pattern", [r"[a]\x00", r"[^b]|\u0000", r"(?x) [a] # [", "[^a]\0"])
def test_what_cannot_be_honoured_is_refused_by_place(schemas, pattern):
    with pytest.raises(GrammarError) as caught:
        schemas.compile({"properties": {"a": {"type": "string", "pattern": pattern}}})
    assert caught.value.where == "#/properties/a/pattern"
