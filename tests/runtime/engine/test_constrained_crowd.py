"""Constrained requests in a crowd, by the libraries' own grammars: each is what it is alone."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from ramet.runtime.engine.guides import Guide
from ramet.runtime.grammar.automaton_backend import AutomatonBackend
from ramet.runtime.grammar.llguidance_backend import LLGuidanceBackend
from ramet.runtime.grammar.spec import Spec
from ramet.runtime.grammar.vocabulary import Vocabulary
from ramet.runtime.protocol.messages import Abort
from ramet.runtime.protocol.sampling import Constraint

BYTES = [*(bytes([97 + i]) for i in range(22)), b"ab", b"cd", b"", b""]
VOCABULARY = Vocabulary(BYTES, eos_ids=(24, 25))
REGEXES = [
    "[a-f]{3,9}g?",
    "(ab|cd)*e",
    "abc(def|klm)q{0,4}",
    "[a-l]{2,60}",
    "a(bcd)*ef",
    "(abcd|cdef){1,9}",
]
GRAMMARS = [
    'root ::= "a" x | "b" x\nx ::= "cd" | "c" x | "klm" [a-f]*',
    'root ::= [a-d]{2,30} "ab"?',
    'root ::= [a-l]* | "abcabcabc"',
]


class Compiled:
    """Grammars of both libraries at once: of regexes by the first one or, if they begin with a
    group of nothing, by the second."""

    def __init__(self) -> None:
        self._made = {}
        self._backends = AutomatonBackend(), LLGuidanceBackend(2)

    def submit(self, spec: Spec):
        def result():
            if spec.key not in self._made:
                second = spec.kind != "regex" or spec.text.startswith("(?:)")
                self._made[spec.key] = self._backends[second].compile(spec, VOCABULARY)
            return self._made[spec.key]

        return SimpleNamespace(done=lambda: True, result=result, cancel=lambda: None)

    def close(self) -> None:
        pass


@pytest.fixture
def letters():
    return Compiled()


@pytest.fixture
def token_bytes():
    return BYTES


def asked(draw: random.Random) -> tuple[list[int], int, dict]:
    """A prompt, how much may follow, and how."""
    specs = [("regex", start + text) for text in REGEXES for start in ("", "(?:)")]
    kind, text = draw.choice([*specs, *(("ebnf", text) for text in GRAMMARS)])
    after = draw.choice(["", "", "", "b", "k"])
    more = {"constraint": Constraint(kind, text, after=after), "jump_forward": draw.random() < 0.5}
    if draw.random() < 0.25:
        more["stops"] = (draw.choice([b"ab", b"e", b"fc", b"kl"]),)
    if draw.random() < 0.5:
        more["stop_ids"] = draw.choice([(24, 25), (24,), (5,), (24, 25, 3)])
    if draw.random() < 0.3:
        more["min_new_tokens"] = draw.randrange(8)
    if draw.random() < 0.2:
        more["logprobs"] = True
    if draw.random() < 0.2:
        more["heal"] = draw.choice([b"a", b"ab", b"abc", b"c"])
    if draw.random() < 0.1:
        del more["constraint"]
    prompt = [draw.randrange(26) for _ in range(draw.randrange(1, 100))]
    return prompt, draw.randrange(1, 60), more


@pytest.mark.parametrize("seed", range(3))
def test_each_is_what_it_is_alone(started, seed, monkeypatch):
    _, connect = started
    client, draw = connect(), random.Random(seed)
    asks = [asked(draw) for _ in range(30)]

    def told(rid: int):
        end = client.finished[rid]
        error = end.error and (end.error.kind, end.error.message)
        return client.tokens.get(rid, []), end.reason, end.matched, end.text_bytes, error

    passes, passed = Guide.passes, []
    monkeypatch.setattr(Guide, "passes", lambda self, token: False)
    alone = []
    for i, (prompt, new, more) in enumerate(asks):
        client.run(i, prompt, new, **more)
        alone.append(told(i))

    def noted(guide: Guide, token: int) -> bool:
        passed.append(passes(guide, token))
        return passed[-1]

    monkeypatch.setattr(Guide, "passes", noted)
    for base in (1000, 2000):
        aborted = set()
        for i in draw.sample(range(len(asks)), len(asks)):
            prompt, new, more = asks[i]
            client.submit(base + i, prompt, new, **more)
            if draw.random() < 0.1:
                client.send(Abort(rids=[base + i]))
                aborted.add(i)
        rids = range(base, base + len(asks))
        client.pump(lambda of=rids: all(rid in client.finished for rid in of), seconds=60)
        for i in range(len(asks)):
            got = told(base + i)
            if i not in aborted or got[1] != "abort":
                assert got == alone[i], asks[i]
    assert any(passed)
    assert not all(passed)
    assert client.ask(1, "info").data["pages"]["held"] == 0
