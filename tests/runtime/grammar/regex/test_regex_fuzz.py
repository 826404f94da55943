"""Random regexes: what the masks allow is what ``re.fullmatch`` takes, no more and no less."""

from __future__ import annotations

import itertools
import re

import pytest
from ramet.runtime.grammar.automaton import TooLarge, build
from ramet.runtime.grammar.automaton_backend import AutomatonBackend
from ramet.runtime.grammar.backend import Refused
from ramet.runtime.grammar.checks_regex import check_regex
from ramet.runtime.grammar.llguidance_backend import LLGuidanceBackend
from ramet.runtime.grammar.outlines_backend import OutlinesBackend
from ramet.runtime.grammar.spec import Spec
from ramet.runtime.protocol.errors import GrammarError

BACKENDS = [OutlinesBackend(), AutomatonBackend(), LLGuidanceBackend()]
LETTERS = ["a", "b", "B", "0", " ", "\n", "é", "😀"]


def short_texts(longest: int, few: int = 4) -> list[str]:
    """All texts of two of the letters, and of a few of them up to ``longest``."""
    sets = [(LETTERS, min(longest, 2)), ([*LETTERS[:few], LETTERS[6]], longest)]
    texts = [
        "".join(t)
        for letters, size in sets
        for n in range(size + 1)
        for t in itertools.product(letters, repeat=n)
    ]
    return sorted(dict.fromkeys(texts), key=len)


def agree(grammar, vocabulary, pattern: re.Pattern, texts: list[str], allowed) -> None:
    """Walk every text letter by letter: what is taken and where it may end is as expected."""
    ids = {data.decode(): i for i, data in reversed([*enumerate(vocabulary.tokens)][:8])}
    matchers = {"": grammar.matcher()}
    taken = [t for t in texts if pattern.fullmatch(t)]
    begun = {t[:n] for t in taken for n in range(len(t) + 1)}
    for text in texts:
        if text:
            matcher = matchers.get(text[:-1])
            if matcher is None:
                continue
            here = matcher.fork()
            if not here.accept(ids[text[-1]]):
                assert text not in begun, f"{pattern.pattern!r} refuses {text!r}"
                continue
            matchers[text] = here
        here = matchers[text]
        assert here.can_end() == (pattern.fullmatch(text) is not None), (pattern.pattern, text)
        if len(text) < 1 or text == "é":
            forced = here.forced_tokens([])
            bits = {forced[0]} if forced else taking(here, vocabulary)
            assert allowed(here, vocabulary) == bits, (pattern.pattern, text)


def taking(matcher, vocabulary) -> set[int]:
    """The ids that are taken here; the matcher is as before."""
    ids: set[int] = set()
    for token in range(vocabulary.size):
        if matcher.accept(token):
            ids.add(token)
            matcher.rollback(1)
    return ids


def run(backend, vocabulary, regexes, count: int, longest: int, allowed) -> tuple[int, int]:
    texts = short_texts(longest)
    compiled = refused = 0
    for _ in range(count):
        source = regexes.pattern()
        pattern = re.compile(source)
        wrong = ""
        try:
            grammar = backend.compile(Spec.of("regex", source), vocabulary)
        except Refused:
            refused += 1
            continue
        except GrammarError as error:
            wrong = str(error)
        if wrong:
            assert "no text can match" in wrong or "bytes" in wrong, source
            assert not any(pattern.fullmatch(t) for t in texts), source
            continue
        compiled += 1
        agree(grammar, vocabulary, pattern, texts, allowed)
    return compiled, refused


def test_the_automaton_is_the_language(random_regexes):
    """2,000 patterns, every text of up to three letters."""
    regexes, texts = random_regexes(1), short_texts(3, few=3)
    data = [t.encode() for t in texts]
    given_up = 0
    for _ in range(2000):
        source = regexes.pattern()
        tree = check_regex(source).tree
        try:
            automaton, pattern = build(tree), re.compile(source)
        except TooLarge:
            given_up += 1
            continue
        for text, encoded in zip(texts, data):
            state = automaton.walk(0, encoded)
            taken = state >= 0 and automaton.is_final(state)
            assert taken == (pattern.fullmatch(text) is not None), (source, text)
    assert given_up < 20


def test_masks_of_states_are_the_language(random_regexes, letters, walks):
    compiled, refused = run(walks.backend, letters, random_regexes(2), 2000, 2, walks.allowed)
    assert compiled > 1800 and refused < 40


def test_llguidance_masks_are_the_language(random_regexes, letters, allowed_ids):
    compiled, _ = run(LLGuidanceBackend(), letters, random_regexes(3), 300, 2, allowed_ids)
    assert compiled > 270


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_masks_are_the_language_of_longer_texts(random_regexes, letters, allowed_ids, backend):
    run(backend, letters, random_regexes(4), 1500, 4, allowed_ids)


def test_all_backends_allow_the_same(random_regexes, letters):
    """Token by token, over random walks: the same ids are taken, and the same texts may end."""
    regexes = random_regexes(5)
    compared = 0
    for _ in range(250):
        spec = Spec.of("regex", regexes.pattern())
        try:
            grammars = [b.compile(spec, letters) for b in BACKENDS]
        except (Refused, GrammarError):
            continue
        one, *others = (g.matcher() for g in grammars)
        for _ in range(8):
            ids = taking(one, letters)
            for other in others:
                assert one.can_end() == other.can_end(), spec.text
                assert one.is_done() == other.is_done(), spec.text
                assert ids == taking(other, letters), spec.text
            if one.is_done():
                break
            texts = [i for i in sorted(ids) if i not in letters.eos_ids]
            token = regexes.random.choice(texts)
            assert one.accept(token) and all(other.accept(token) for other in others)
            compared += 1
    assert compared > 600
