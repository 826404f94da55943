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


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"^{a}$", ["{a}"], ["a"]),
        (r"^a{b}{2}$", ["a{b}}"], ["a{b}", "ab"]),
        (r"^a{}{ ,2}$", ["a{}{ ,2}"], ["a", "aa"]),
        (r"^\{x{1,2}\}{2}$", ["{xx}}"], ["{x}", "x"]),
        (r"^[{]a{2,}[}]$", ["{aa}"], ["{a}"]),
        (r"^\cA[\cJ\b]$", ["\x01\n", "\x01\x08"], ["A\n", "\x01b"]),
        (r"^\ud83d\ude00[\uD83D\uDE00-\uD83D\uDE02]$", ["😀😁"], ["😀", "😀😃"]),
        (r"^\u{1F600}\x{41}\p{Lu}$", ["😀AÉ"], ["😀Aé"]),
        (r"^\<b\>$", ["<b>"], ["b"]),
        (r"^[\\b]$", ["\\", "b"], ["\x08"]),
    ],
)
def test_what_javascript_writes_otherwise(schemas, pattern, good, bad):
    grammar = schemas.compile({"type": "string", "pattern": pattern})
    taken = [t for t in good + bad if schemas.takes(grammar, json.dumps(t, ensure_ascii=False))]
    assert taken == good


def test_what_is_plain_stays_as_it_is():
    for pattern in ("^[a-z0-9_-]+$", r"\[x\]", "^[A-Z][a-z]*( [A-Z])?$", r"[\s\S]*", "[unclosed"):
        assert lower_pattern(pattern, "#") == pattern


@pytest.mark.parametrize("pattern", ["a{,2}", "[a", "(a", r"\q", r"\p{Foo}", "*"])
@pytest.mark.parametrize("keyword", ["pattern", "patternProperties"])
def test_what_is_no_pattern_is_named_by_place(schemas, pattern, keyword):
    bad = {"pattern": pattern} if keyword == "pattern" else {"patternProperties": {pattern: {}}}
    schema = {"properties": {"b": {"pattern": "a.c"}, "a": {**bad, "minLength": 2}}}
    with pytest.raises(GrammarError) as caught:
        schemas.compile({"$ref": "#/$defs/x", "$defs": {"x": schema}})
    where = f"#/$defs/x/properties/a/{keyword}"
    assert caught.value.where == (where if keyword == "pattern" else f"{where}/{pattern}")
    assert repr(pattern) in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("pattern", "word"),
    [
        (r"^\p{L}(?=a)", "look-ahead"),
        (r"(?<n>a)(?<!b)", "look-behind"),
        (r"(?<n>a)\1", "backreference"),
        (r"\u{1F600}\b", "word boundary"),
    ],
)
def test_what_no_automaton_has_is_named_in_javascript_too(schemas, pattern, word):
    with pytest.raises(GrammarError, match=word) as caught:
        schemas.compile({"type": "string", "pattern": pattern})
    assert caught.value.where == "#/pattern"


@pytest.mark.parametrize("pattern", [r"[a]\x00", r"[^b]|\u0000", r"(?x) [a] # [", "[^a]\0"])
def test_what_cannot_be_honoured_is_refused_by_place(schemas, pattern):
    with pytest.raises(GrammarError) as caught:
        schemas.compile({"properties": {"a": {"type": "string", "pattern": pattern}}})
    assert caught.value.where == "#/properties/a/pattern"
