"""Grammars: what is wrong with them is named, and greedy lexemes read them right."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from ramet.runtime.grammar.automaton_backend import AutomatonBackend
from ramet.runtime.grammar.backend import Refused
from ramet.runtime.grammar.checks import check_spec
from ramet.runtime.grammar.checks_grammar import check_gbnf
from ramet.runtime.grammar.doubling import without_doubling
from ramet.runtime.grammar.gbnf import Alt, Ref, Rep, Seq, parse_gbnf
from ramet.runtime.grammar.llguidance_backend import LLGuidanceBackend
from ramet.runtime.grammar.regex_tree import Chars, Repeat, Sequence, Union
from ramet.runtime.grammar.spec import Spec
from ramet.runtime.grammar.vocabulary import Vocabulary
from ramet.runtime.protocol.errors import GrammarError

LETTERS = "abc"
LONGEST = 5
TEXTS = ["".join(t) for n in range(LONGEST + 1) for t in itertools.product(LETTERS, repeat=n)]


@pytest.fixture(scope="module")
def letters() -> Vocabulary:
    tokens = [b"a", b"b", b"c", b"ab", b"bc", b"aa", b"ca", b"abc", b""]
    return Vocabulary(tokens, eos_ids=[8])


@pytest.fixture(scope="module")
def single_bytes() -> Vocabulary:
    return Vocabulary([*(bytes((i,)) for i in range(256)), b""], eos_ids=[256])


def compile_(text: str, vocabulary: Vocabulary):
    spec = Spec("ebnf", text)
    check_spec(spec)
    return LLGuidanceBackend().compile(spec, vocabulary)


def compiled(text: str, vocabulary: Vocabulary):
    """By every backend that takes it."""
    spec = Spec("ebnf", text)
    check_spec(spec)
    backends = [LLGuidanceBackend(), AutomatonBackend()]
    return [b.compile(spec, vocabulary) for b in backends if b.supports(spec) is None]


def takes(grammar, vocabulary: Vocabulary, text: str) -> bool:
    """Through the masks, in the shortest tokens."""
    matcher = grammar.matcher()
    row = np.zeros(vocabulary.words, np.int32)
    for byte in text.encode():
        token = vocabulary.tokens.index(bytes((byte,)))
        row[:] = 0
        if not matcher.is_done():
            matcher.fill(row)
        allowed = bool(row[token >> 5] >> (token & 31) & 1)
        taken = matcher.accept(token)
        assert taken or not allowed
        if not taken:
            return False
    return matcher.can_end()


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "word", "where"),
    [
        ('start ::= "a"', "root", None),
        ("", "no rule", None),
        ("root ::= other", "'other'", "rule root"),
        ('root ::= "a" | [b', "unexpected '['", "line 1, column 16"),
        ('root ::= "a\nx', "unexpected '\"'", "line 1, column 10"),
        ('root ::= ("a"\nx ::= "b"', "no end", "line 1, column 10"),
        ('root ::= "a" )', "expected", "line 1, column 14"),
        ('root ::= "a"{2', "unexpected '{'", "line 1, column 13"),
        ('root ::= "a"{3,2}', "ends before", "line 1, column 13"),
        ('root ::= "a"{99999}', "over", "line 1, column 13"),
        ('root ::= "a"{x}', "repeat", "line 1, column 13"),
        ("root ::= [z-a]", "ends before", "line 1, column 10"),
        ("root ::= []", "without any", "line 1, column 10"),
        ('root ::= "\\q"', "escape", "line 1, column 11"),
        ('root ::= "\\uD800"', "not a character", "line 1, column 11"),
        ('root ::= "a"\nroot ::= "b"', "twice", "line 2, column 1"),
        ("root ::= root", "no end", "rule root"),
        ('root ::= "a" b\nb ::= b "c"', "no end", "rule root"),
        ('root ::= "a" | b\nb ::= "x" b', "no end", "rule b"),
        ('root ::= "a" *** * * *', "too many repeats", "line 1, column 18"),
        ('root = "a"', "unexpected '='", "line 1, column 6"),
        ("root ::= " + "(" * 200 + '"a"' + ")" * 200, "nests", None),
    ],
)
def test_what_is_wrong_is_named(text, word, where):
    with pytest.raises(GrammarError) as caught:
        check_spec(Spec("ebnf", text))
    assert word in caught.value.message
    assert caught.value.where == where
    assert len(str(caught.value)) < 300


def test_a_grammar_that_explodes_is_refused(single_bytes):
    rules = ['root ::= r0 | "(" root ")"']
    rules += [f"r{i} ::= (r{i + 1} r{i + 1}){{9}}" for i in range(6)]
    text = "\n".join([*rules, 'r6 ::= [a-z] "x"'])
    with pytest.raises(GrammarError, match="large"):
        compile_(text, single_bytes)


# --- meaning --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "valid", "invalid"),
    [
        ('root ::= [a-z]+ "x"', ["ax", "abxx"], ["x", "ab"]),
        ('root ::= name "x"\nname ::= [a-z]+', ["ax", "abxx"], ["x", "ab"]),
        ('root ::= "(" root ")" | [a-z]+ "x"', ["ax", "((abxx))"], ["x", "(x)", "(ax"]),
        ('root ::= w | "(" root ")"\nw ::= [a-z]+ ("if" | "in")', ["(zif)", "inin"], ["if"]),
        ('root ::= ""', [""], ["a"]),
        ("root ::=", [""], ["a"]),
        ('root ::= "" | "a" root', ["", "aaa"], ["b"]),
        ("root ::= .{2}", ["ab", "é\n"], ["a", "abc"]),
        ('root ::= [^"\\\\\\x00-\\x1f]*', ["é/ü", ""], ['"', "\\", "\n"]),
        ("root ::= [a\\-z] [\\]] [-x] [^a-c]", ["-]xd", "a]-é"], ["b]xd", "a]xa"]),
        ('root ::= "\\u00e9\\x41\\U0001F600\\n\\t\\\\\\""', ['éA😀\n\t\\"'], ["éA"]),
        ('# a comment\nroot ::= "a" # more\n  | "b"\n\n  | x\nx ::= "c"', ["a", "b", "c"], ["d"]),
        ('my-rule ::= "a"\nroot ::= my-rule+', ["aa"], [""]),
        ('unused ::= "x"\nroot ::= "a"', ["a"], ["x"]),
        ('root ::= e\ne ::= e "+" e | [0-9]+ | "(" e ")"', ["1+2", "(1+23)+4"], ["1+", "(1"]),
        ('root ::= "a" root "b" | ""', ["", "aabb"], ["aab", "ba"]),
    ],
)
def test_what_a_grammar_means(single_bytes, text, valid, invalid):
    for grammar in compiled(text, single_bytes):
        assert [t for t in valid if not takes(grammar, single_bytes, t)] == []
        assert [t for t in invalid if takes(grammar, single_bytes, t)] == []


def test_a_grammar_that_leads_back_to_itself_has_no_automaton(single_bytes):
    plain, nested = 'root ::= x+\nx ::= "a" | "b"', 'root ::= "a" root "b" | ""'
    kinds = [[g.kind for g in compiled(text, single_bytes)] for text in (plain, nested)]
    assert kinds == [["llguidance", "automaton"], ["llguidance"]]
    for text in (nested, 'start: "a"'):
        with pytest.raises(Refused, match=r"lead back|Lark"):
            AutomatonBackend().try_in_worker(Spec("ebnf", text), single_bytes)


DOUBLED = [
    'root ::= root root | "a" | "b"',
    'root ::= root root root | "a"',
    'root ::= root root root | root root | "ab" | ""',
    'root ::= root "b" root | root root | "a" | "c" root | root "c"',
    'root ::= (root "b" root | "a") | (("c" | root))',
    'root ::= x x\nx ::= x "a" x | "b" | "c" x "c" | ""',
    'root ::= x\nx ::= x y x | "a"\ny ::= x x | "b" y "b" | "c"',
    'root ::= root ("b" root "b") root | "a" | root{2} | root+ root | root',
    'root ::= root (root | "b") root | "a"',
    "root ::= root root",
]


@pytest.mark.parametrize("text", DOUBLED)
def test_rules_that_double_themselves_mean_the_same_as_repeats(letters, text):
    rules = parse_gbnf(text)
    again = without_doubling(rules)
    assert language(again) == language(rules)
    if "a" in text:
        assert again != rules
        grammar = compile_(text, letters)
        assert frozenset(t for t in TEXTS if takes(grammar, letters, t)) == language(rules)


def test_other_rules_stay_as_they_are():
    rules = parse_gbnf('root ::= "(" root ")" | root "a" | "b" root | x "c" x\nx ::= "a"')
    assert without_doubling(rules) == rules


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ('root ::= e\ne ::= e "+" e | e "*" e | "(" e ")" | [0-9]', "1+2*(3)+" * 200 + "1"),
        ('root ::= root root | "a" | "b"', "ab" * 800),
    ],
)
def test_a_long_output_of_an_ambiguous_grammar(single_bytes, text, output):
    """Each of its tokens took longer than the one before, up to a limit that ended the output."""
    matcher = compile_(text, single_bytes).matcher()
    row = np.zeros(single_bytes.words, np.int32)
    for byte in output.encode():
        assert matcher.accept(byte)
        matcher.fill(row)
    assert matcher.can_end()


def test_lark_is_read_as_it_is(single_bytes):
    grammar = compile_('start: "a" thing\nthing: /[0-9]+/ | "(" thing ")"', single_bytes)
    assert takes(grammar, single_bytes, "a(12)")
    assert not takes(grammar, single_bytes, "a(12")
    with pytest.raises(GrammarError, match="thing"):
        compile_('start: "a" thing', single_bytes)


def test_json_with_blanks_is_read_fast_and_right(single_bytes):
    """A grammar in which blanks end most rules and begin others."""
    text = r"""
        root   ::= ws value ws
        value  ::= object | array | string | number | "true" | "null"
        object ::= "{" ws (pair (ws "," ws pair)*)? ws "}"
        pair   ::= string ws ":" ws value
        array  ::= "[" ws (value (ws "," ws value)*)? ws "]"
        string ::= "\"" ([^"\\\x00-\x1f] | "\\" ["\\/bfnrt])* "\""
        number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)?
        ws     ::= [ \n]*
    """
    grammar = compile_(text, single_bytes)
    for good in (' { "a" : [1, 2.5 ,{"b\\n":null} ] } ', "[]", "\n-0.5 ", '{"a":"é"}'):
        assert takes(grammar, single_bytes, good), good
    for bad in ("{", '{"a"}', "[1,]", "01", '{"a" 1}', "[1 2]", "tru"):
        assert not takes(grammar, single_bytes, bad), bad


class RandomGrammar:
    """A few rules over three letters, recursive or not."""

    ATOMS = ('"a"', '"b"', '"ab"', "[ab]", "[a-c]", '"c"', '"abc"', "[bc]", '""')

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.names = ["root", "x", "y"][: self.random.randint(1, 3)]
        self.text = "\n".join(f"{n} ::= {self.part(3)} | {self.part(2)}" for n in self.names)

    def part(self, depth: int) -> str:
        pick = self.random.random()
        if depth == 0 or pick < 0.3:
            return self.random.choice(self.ATOMS)
        if pick < 0.5:
            return self.random.choice(self.names)
        if pick < 0.88:
            sign = " " if pick < 0.72 else " | "
            count = self.random.randint(2, 3)
            return "(" + sign.join(self.part(depth - 1) for _ in range(count)) + ")"
        return f"({self.part(depth - 1)}){self.random.choice(['*', '+', '?', '{2}', '{1,2}'])}"


def language(rules) -> frozenset[str]:
    """All texts of at most `LONGEST` letters, by growing the rules' languages until they stop."""
    known = dict.fromkeys(rules, frozenset())

    def join(left, right):
        return frozenset(x + y for x in left for y in right if len(x) + len(y) <= LONGEST)

    def of(expr):
        match expr:
            case Ref():
                return known[expr.name]
            case Seq() | Sequence():
                whole = frozenset([""])
                for part in expr.parts:
                    whole = join(whole, of(part))
                return whole
            case Alt() | Union():
                return frozenset().union(*map(of, expr.parts))
            case Chars():
                return frozenset(
                    c for c in LETTERS if any(a <= ord(c) <= b for a, b in expr.ranges)
                )
            case Rep() | Repeat():
                body, times, found = of(expr.body), frozenset([""]), frozenset()
                high = expr.low + LONGEST + 1 if expr.high is None else expr.high
                for count in range(high + 1):
                    found |= times if count >= expr.low else frozenset()
                    times = join(times, body)
                return found
        raise AssertionError(expr)

    while True:
        grown = {name: of(expr) for name, expr in rules.items()}
        if grown == known:
            return known["root"]
        known = grown


def check_random(seeds, letters) -> int:
    count = 0
    for seed in seeds:
        text = RandomGrammar(seed).text
        try:
            rules = check_gbnf(text)
        except GrammarError:
            continue
        count += 1
        for grammar in compiled(text, letters):
            found = frozenset(t for t in TEXTS if takes(grammar, letters, t))
            assert found == language(rules), text
    return count


def test_random_grammars_mean_what_they_say(letters):
    assert check_random(range(100), letters) > 80


@pytest.mark.slow
def test_many_random_grammars(letters):
    assert check_random(range(1000, 2200), letters) > 900


def test_rules_keep_their_order():
    assert list(parse_gbnf('b ::= "x"\nroot ::= b\na ::= "y"')) == ["b", "root", "a"]
