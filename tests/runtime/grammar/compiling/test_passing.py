"""Guides that go on by a token at once, as nothing else is to be done for it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from ramet.runtime.engine.guides import Guide, Guides
from ramet.runtime.engine.together import MANY_STEPS
from ramet.runtime.grammar.automaton_backend import AutomatonBackend
from ramet.runtime.grammar.llguidance_backend import LLGuidanceBackend
from ramet.runtime.grammar.prefix_matcher import PrefixGrammar
from ramet.runtime.grammar.spec import Spec
from ramet.runtime.protocol import GrammarError
from ramet.runtime.protocol.messages import EngineSampling
from ramet.runtime.protocol.sampling import Constraint


class Once:
    """A compiler that has compiled."""

    def __init__(self, grammar) -> None:
        self.grammar = grammar

    def submit(self, _spec):
        return SimpleNamespace(done=lambda: True, result=lambda: self.grammar)


@pytest.mark.parametrize("jump", [True, False])
@pytest.mark.parametrize("backend", [LLGuidanceBackend(), AutomatonBackend()], ids=lambda b: b.name)
def test_what_is_forced_is_passed_only_where_nobody_jumps(backend, jump, small):
    grammar = backend.compile(Spec.of("regex", "a[bc]xyz"), small)
    guides = Guides(lambda: Once(grammar), small.eos_ids)
    for serial in (1, 2):
        sampling = EngineSampling(
            max_new_tokens=9, constraint=Constraint("regex", "a[bc]xyz"), jump_forward=jump
        )
        request = SimpleNamespace(serial=serial, sampling=sampling)
        guides.start(request)
        assert [error for _, error in guides.ready()] == [None]
        left = []
        for token in b"ab":
            found = guides.go_on([(request, token)])
            left += found
            if found:
                guides[request].accept(token, bytes((token,)))
                assert not guides[request].done
                guides[request].forced([])
    assert left == ([(request, ord("b"))] if jump else [])


@pytest.mark.parametrize("backend", [LLGuidanceBackend(), AutomatonBackend()], ids=lambda b: b.name)
def test_what_comes_first_or_is_free_is_passed_by_nobody(backend, small):
    grammar = backend.compile(Spec.of("regex", "ab*"), small)
    known = grammar.matcher()
    assert known.accept(ord("a"))
    assert not known.is_done()
    assert known.forced_tokens([]) == []
    opening = PrefixGrammar(small).matcher(b"ab")
    assert Guide(grammar.matcher(), ()).passes(ord("a"))
    assert not Guide(grammar.matcher(), (), opening=opening).passes(ord("a"))
    assert not Guide(grammar.matcher(), (), b"</think>").passes(ord("a"))
    assert not Guide(None, ()).passes(ord("a"))
    for guide, before in (
        (Guide(grammar.matcher(), (), opening=PrefixGrammar(small).matcher(b"ab")), b"ab"),
        (Guide(grammar.matcher(), (), b"ab"), b"xab"),
    ):
        for token in before:
            assert not guide.passes(token)
            guide.accept(token, bytes((token,)))
        assert not guide.passes(ord("x"))
        assert guide.passes(ord("a"))


def masks_of(guides: Guides, requests: list, words: int) -> tuple[list[int], np.ndarray]:
    """As of a step in which each of the requests samples."""
    places = np.arange(len(requests))
    planned = SimpleNamespace(
        batch=SimpleNamespace(masked=places), rows=places, epochs=np.zeros(len(requests), int)
    )
    rows = SimpleNamespace(requests=requests, epoch=np.zeros(len(requests), int))
    out = np.zeros((len(requests), words), np.int32)
    of, failed = guides.masks(planned, rows, out)
    assert not failed
    return of.tolist(), out


def test_outputs_alike_share_a_row(small):
    """Those of one place in a grammar, whose row is kept; nothing else does."""
    automaton = AutomatonBackend().compile(Spec.of("regex", "[ab]*c"), small)
    library = LLGuidanceBackend().compile(Spec.of("regex", "[a-z]*"), small)
    guides = Guides(lambda: Once(automaton), small.eos_ids)
    sampling = EngineSampling(max_new_tokens=9, constraint=Constraint("regex", ""), seed=0)
    requests = [SimpleNamespace(serial=i, sampling=sampling) for i in range(6)]
    for request in requests:
        guides._compiler = Once(automaton if request.serial < 3 else library)
        guides.start(request)
    assert len(list(guides.ready())) == 6
    assert masks_of(guides, requests, small.words)[0] == [0, 1, 2, 3, 4, 5]
    step = [(request, ord("a")) for request in requests]
    for request, token in guides.go_on(step):  # nobody knows anything yet
        guides[request].accept(token, b"a")
        assert not guides[request].done and guides[request].forced([]) == []
    masks_of(guides, requests, small.words)
    step = [(request, ord("b")) for request in requests]
    for request, token in guides.go_on(step):
        guides[request].accept(token, b"b")
        assert not guides[request].done and guides[request].forced([]) == []
    of, out = masks_of(guides, [*requests, None], small.words)
    assert of[0] == of[1] == of[2] == 0 and len(set(of)) == 5
    assert (out[of[-1]] == -1).all()
    for request, row in zip(requests, of):
        alone = np.zeros(small.words, np.int32)
        guides[request].fill(alone)
        assert (out[row] == alone).all()


def test_many_that_need_nothing_go_on_at_once(small):
    """Of an automaton: all but those that are done, that must jump, or that fail."""
    grammar = AutomatonBackend().compile(Spec.of("regex", "[a-f]{3}x?|[gh]yz"), small)
    known = grammar.matcher()
    for word in (b"abcx", b"gyz"):
        for token in word:
            assert known.accept(token)
            known.is_done()
        known.rollback(len(word))
    sampling = EngineSampling(max_new_tokens=9, constraint=Constraint("regex", ""))
    requests = [SimpleNamespace(serial=i, sampling=sampling) for i in range(2 * MANY_STEPS)]
    guides = Guides(lambda: Once(grammar), small.eos_ids)
    for request in requests:
        guides.start(request)
    assert [error for _, error in guides.ready()] == [None] * len(requests)
    words = [[*b"abcx"], [*b"gyz"], [*b"fq"], [*b"def", small.eos_ids[0]]]
    for at, awaited in enumerate([{1}, {1, 2}, {1}, {0, 3}]):
        step = [(r, words[i % 4][at]) for i, r in enumerate(requests) if at < len(words[i % 4])]
        left = guides.go_on(step)
        assert left == [one for one in step if one[0].serial % 4 in awaited]
        for request, token in left:
            guide = guides[request]
            if token == ord("q"):
                with pytest.raises(GrammarError, match="does not go on"):
                    guide.accept(token, b"q")
                continue
            guide.accept(token, small.tokens[token])
            assert guide.done == (at == len(words[request.serial % 4]) - 1)
            assert guide.ended == (token in small.eos_ids)
