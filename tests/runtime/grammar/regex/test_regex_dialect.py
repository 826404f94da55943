"""Which regexes are taken, what they mean, and how the others are refused."""

from __future__ import annotations

import itertools
import json
import re
import time
import unicodedata

import pytest
from ramet.runtime.grammar import unicode_scripts
from ramet.runtime.grammar.automaton import build
from ramet.runtime.grammar.charset import (
    ANY,
    category,
    complement,
    contains,
    folded,
    ranges_of,
    unicode_property,
)
from ramet.runtime.grammar.checks_regex import check_choices, check_regex
from ramet.runtime.grammar.regex_tree import fixed_text, literal, portable
from ramet.runtime.grammar.utf8 import trie_of
from ramet.runtime.protocol.errors import GrammarError


def matches(pattern: str, text: str) -> bool:
    automaton = build(check_regex(pattern).tree)
    state = automaton.walk(0, text.encode())
    return state >= 0 and automaton.is_final(state)


@pytest.mark.parametrize(
    ("pattern", "what", "place"),
    [
        (r"(a|b)\1", "backreference", 5),
        (r"a\1", "backreference", 1),
        (r"(?P<x>a)(?P=x)", "backreference", 8),
        (r"(a)?(?(1)b|c)", "conditional group", 4),
        (r"x(?=a)", "look-ahead", 1),
        (r"x(?!a)b", "look-ahead", 1),
        (r"ab(?<=b)c", "look-behind", 2),
        (r"ab(?<!b)c", "look-behind", 2),
        (r"(?<=a+)c", "look-behind", 0),
        (r"\bword", "word boundary", 0),
        (r"[\b]a\B", "word boundary", 5),
        (r"(?>ab|a)c", "atomic group", 0),
        (r"xa++b", "possessive quantifier", 3),
        (r"a^b", "anchor", 1),
        (r"(a$)b", "anchor", 2),
        (r"(^a){2}", "anchor", 1),
        (r"(b?)^a", "anchor", 4),
        (r"(a{1000}){1000}", "repeats too large", 2),
        (r"[ab]{5000000000}", "repeat is too large", 4),
        (r"(a", "unterminated subpattern", 0),
        (r"a)b", "unbalanced parenthesis", 1),
        (r"x*{2}", "multiple repeat", 2),
        (r"[z-a]", "bad character range", 1),
        (r"[[:alpha:]]", "POSIX", 1),
        (r"a\p{Greeky}", "no class of Unicode", 1),
        (r"a\p{L)|(?:L}", "no class of Unicode", 1),
        (r"[\p{Greek=Latin}]", "no class of Unicode", 1),
        (r"\x{110000}", "no character", 0),
        (r"ab[^\s\S]cd", "no text can match", 2),
        (r"[^\w\W]|a[^\d\D]", "no text can match", 0),
        (r"[a-z]+[^]x\D\d]", "no text can match", 6),
    ],
)
def test_what_has_no_automaton_is_refused_by_name_and_place(pattern, what, place):
    with pytest.raises(GrammarError, match=re.escape(what)) as caught:
        check_regex(pattern)
    assert caught.value.where == f"character {place}"
    assert len(str(caught.value)) < 200


def test_places_are_those_of_the_text_as_given():
    """Not of the text after classes and escapes were replaced."""
    with pytest.raises(GrammarError) as caught:
        check_regex(r"\p{Lu}\u{1F600}(?<n>x)(")
    assert caught.value.where == "character 22"


@pytest.mark.parametrize("pattern", ["(" * 5000 + ")" * 5000, "a" * 60_000, "((((a|b)+" * 900])
def test_what_is_too_deep_or_too_long_is_an_error(pattern):
    with pytest.raises(GrammarError) as caught:
        check_regex(pattern)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "pattern",
    [
        r"\w-" * 16_000,
        "(?i)" + "".join(f"[a-{chr(0x300 + i)}]" for i in range(9_000)),
        "".join(rf"[\W{chr(0x300 + i)}]" for i in range(9_000)),
        r"\p{Ll}" * 7_000,
    ],
    ids=["words", "cases", "negated", "letters"],
)
def test_what_would_take_long_to_read_is_refused_soon(pattern):
    start = time.process_time()
    with pytest.raises(GrammarError, match="classes"):
        check_regex(pattern)
    assert time.process_time() - start < 8


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        (r"\d{3}", ["123", "٣٤٥"], ["12", "12a"]),
        (r"(?a)\d{3}", ["123"], ["٣٤٥"]),
        (r"\w+", ["naïve_1", "日本"], ["a b", ""]),
        (r"(?a)\w+", ["abc"], ["naïve"]),
        (r"\s", ["\u2003", "\n", "\x1c"], ["a"]),
        (r".", ["a", "😀", "\r"], ["\n", ""]),
        (r"(?s).", ["\n"], []),
        (r"(?i)straße", ["STRAßE", "ſtraße"], ["strasse"]),
        (r"(?i)[k-l]", ["K", "\u212a", "L"], ["m"]),
        (r"(?i)[^k]", ["l"], ["K", "\u212a"]),
        (r"a(?i:b)c", ["aBc", "abc"], ["ABc", "abC"]),
        (r"(?i:a(?-i:b))", ["Ab", "ab"], ["AB"]),
        (r"(?x) a b # no c", ["ab"], ["a b"]),
        (r"\p{Lu}\P{Lu}\pN", ["Éa1"], ["éa1", "ÉÉ1"]),
        (r"[\p{Ll}_-]+", ["é_-"], ["É"]),
        (r"[^\p{L}]", ["1", "-"], ["a", "é"]),
        (r"\p{Letter}\p{^Letter}", ["a1"], ["ab"]),
        (r"\p{Greek}+\P{Greek}", ["αβγa", "Ωж"], ["αβγ", "a"]),
        (r"[\p{Han}\p{Hiragana}]+", ["日本の", "𠀀"], ["日a", "カ"]),
        (r"\p{Script=Cyrillic}\p{scx=Cyrl}", ["жж"], ["zж"]),
        (r"\p{White Space}\p{Alphabetic}\p{Emoji_Presentation}", [" é😀"], ["é é", " éa"]),
        (r"\u{1F600}\x{e9}\x41", ["😀éA"], ["😀eA"]),
        (r"(?<year>[0-9]{4})\z", ["1984"], ["84"]),
        (r"^(a|b)$|^c$", ["a", "b", "c"], ["ac", "a\n"]),
        (r"(^a|b$)?", ["a", "b", ""], ["ab"]),
        (r"[]a]+", ["]a"], ["b"]),
        (r"[^]a]", ["b"], ["]", "a"]),
        (r"a{,2}", ["", "aa"], ["aaa"]),
        (r"a{x}", ["a{x}"], ["aa"]),
        (r"\{\"a\": \[\]\}", ['{"a": []}'], []),
        (r"a|", ["a", ""], ["aa"]),
        ("", [""], ["a"]),
        (r"a[^\s\S]|b", ["b"], ["a"]),
        (r"(a[^\s\S])*c", ["c"], ["ac"]),
        (r"(yes|yes please)", ["yes", "yes please"], ["yes "]),
        (r"[0-9]+(\.[0-9]+)?", ["0.5", "10"], ["0."]),
    ],
)
def test_the_dialect_is_pythons_of_the_whole_text_and_a_little_more(pattern, yes, no):
    assert [t for t in yes if not matches(pattern, t)] == []
    assert [t for t in no if matches(pattern, t)] == []
    spelled = check_regex(pattern).pattern
    assert [t for t in yes if not re.fullmatch(spelled, t)] == []
    assert [t for t in no if re.fullmatch(spelled, t)] == []


def test_spelled_out_patterns_hold_nothing_that_dialects_read_differently():
    for pattern in (r"(?i)\w.\s[^\d]", r"\p{Lu}(?s:.)#/'\"~&&--", "[a&&b-c]"):
        spelled = check_regex(pattern).pattern
        assert not re.search(r"\(\?(?!:)|(?<!\\)\.|\\[a-tv-wyzA-TV-Z]|[#&~/'\"]", spelled)


def test_classes_are_those_of_python():
    points = [*range(0x3000), *range(0xA000, 0x12000, 7), *range(0x1D7C0, 0x1D800)]
    for letter in "dws":
        inside, outside = category(letter), category(letter.upper())
        pattern = re.compile(rf"\{letter}")
        for point in points:
            if not 0xD800 <= point <= 0xDFFF:
                expected = pattern.match(chr(point)) is not None
                assert contains(inside, point) == expected, hex(point)
                assert contains(outside, point) != expected, hex(point)


def test_shortcuts_over_all_of_unicode_leave_nothing_out():
    cased = [p for p in range(0x20000, 0x110000) if chr(p).lower() != chr(p) != chr(p).upper()]
    assert cased == []
    names = {name: unicode_property(name) for name in ("Lu", "Lo", "Nd", "Cn", "Co", "Cf", "So")}
    for point in range(0x20000, 0x110000, 1):
        ranges = names.get(unicodedata.category(chr(point)))
        if point % 13 == 0 or point & 0xFFFF > 0xFFF0:
            assert ranges is None or contains(ranges, point), hex(point)


def test_scripts_are_found_whole():
    han = unicode_scripts.library_class("Han") or ()
    for first, last in ((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0xF900, 0xFA6D)):
        assert all(contains(han, point) for point in range(first, last + 1))
    assert not any(contains(han, ord(c)) for c in "aあア가、。")
    letters = unicode_scripts.library_class("Alphabetic") or ()
    known = [p for p in range(0x20000) if chr(p).isalpha()]
    assert [hex(p) for p in known if not contains(letters, p)] == []
    assert unicode_scripts.library_class("ASCII_Hex_Digit") == ((48, 57), (65, 70), (97, 102))
    assert unicode_scripts.library_class("x" * 90) is None


def test_case_is_folded_as_python_does():
    for point in [*range(0x250), 0x345, 0x3B9, 0x3C3, 0x1E9E, 0x212A, 0x1C8A, 0x10400, 0x10428]:
        mine = folded(((point, point),))
        pattern = re.compile(re.escape(chr(point)), re.IGNORECASE)
        for other in [
            *range(0x600),
            *range(0x1C80, 0x1C90),
            *range(0x1E80, 0x2200),
            0x10400,
            0x10428,
        ]:
            expected = pattern.fullmatch(chr(other)) is not None
            assert contains(mine, other) == expected, (hex(point), hex(other))
    wide = folded(((0x41, 0x2FF),))
    pattern = re.compile("[A-\u02ff]", re.IGNORECASE)
    for other in range(0x2200):
        assert contains(wide, other) == (pattern.fullmatch(chr(other)) is not None), hex(other)


def test_sets_of_characters_are_spelled_in_utf8_exactly():
    edges = [0, 0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF]
    near = sorted({p + d for p in edges for d in (-1, 0, 1, 65)} & set(range(0x110000)))
    near = [p for p in near if not 0xD800 <= p <= 0xDFFF]
    for first, last in itertools.combinations(near[::2], 2):
        ranges = ranges_of([(first, last)])
        trie = trie_of(ranges)
        for point in near:
            assert _in_trie(trie, chr(point).encode()) == contains(ranges, point)
    assert complement(ANY) == () and complement(()) == ANY


def _in_trie(trie, data: bytes) -> bool:
    node = 0
    for i, byte in enumerate(data):
        child = next((c for low, high, c in trie.nodes[node] if low <= byte <= high), None)
        if child is None:
            return False
        if child == -1:
            return i == len(data) - 1
        node = child
    return False


def test_literals_mean_themselves():
    text = "a.b*c[d]{2}(e)|f\\g^h$i+j?k#l&m~n-o \n\t\x00\x7f é日😀"
    assert fixed_text(literal(text)) == text
    assert re.fullmatch(portable(literal(text)), text)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[", "not JSON"),
        ("{}", "list"),
        ("[]", "at least one"),
        ('["a", 1]', "strings"),
        ('"abc"', "list"),
        ('["\\ud800"]', "surrogate"),
        (json.dumps(["x"] * 30_000), "choices"),
    ],
)
def test_choices_are_checked(text, what):
    with pytest.raises(GrammarError, match=what) as caught:
        check_choices(text)
    assert len(str(caught.value)) < 200


def test_choices_are_literal_text():
    choices = ["a.c", "a+", "(x)", "", "日本", "a.c", 'q"\\']
    pattern = check_choices(json.dumps(choices)).pattern
    assert all(re.fullmatch(pattern, choice) for choice in choices)
    assert not any(re.fullmatch(pattern, text) for text in ("abc", "aa", "x", "日"))
