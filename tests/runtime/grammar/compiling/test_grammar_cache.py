"""Which grammars are remembered, and how much they may take together."""

from __future__ import annotations

from ramet.runtime.grammar.cache import GrammarCache


class Growing:
    """A grammar that takes as many bytes as it is told."""

    kind = "growing"

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def matcher(self):
        raise NotImplementedError


def test_the_least_recently_used_go_first():
    cache = GrammarCache(100)
    for key in "abc":
        cache.keep(key, Growing(40))
    assert cache.find("a") is None
    assert cache.find("b") is not None
    cache.keep("d", Growing(40))
    assert cache.find("c") is None
    assert cache.find("b") is not None


def test_grammars_that_grow_while_they_are_used_are_counted_anew():
    cache = GrammarCache(100)
    grammars = {key: Growing(10) for key in "abcd"}
    for key, grammar in grammars.items():
        cache.keep(key, grammar)
    for grammar in grammars.values():
        grammar.nbytes = 45
    assert cache.find("a") is grammars["a"]
    assert cache.nbytes <= 100
    assert cache.find("d") is grammars["d"]
    assert cache.find("b") is None


def test_one_that_is_larger_than_all_room_is_still_handed_out_once():
    cache = GrammarCache(100)
    grammar = Growing(10)
    cache.keep("a", grammar)
    grammar.nbytes = 500
    assert cache.find("a") is grammar
    assert cache.find("a") is None


def test_a_hit_asks_no_other_grammar_what_it_holds():
    """Thousands may be kept, and the engine waits for a hit."""

    class Asked(Growing):
        def __init__(self) -> None:
            self.asked = 0

        @property
        def nbytes(self) -> int:
            self.asked += 1
            return 10

    cache = GrammarCache(5_000)
    grammars = [Asked() for _ in range(500)]
    for i, grammar in enumerate(grammars):
        cache.keep(str(i), grammar)
    before = sum(grammar.asked for grammar in grammars)
    for _ in range(10):
        assert cache.find("7") is grammars[7]
    assert sum(grammar.asked for grammar in grammars) <= before + 20
    assert cache.nbytes == 5_000
