"""Requests that score a tree of continuations, through the engine's loop and its socket."""

from __future__ import annotations

import numpy as np
import pytest
from ramet.runtime.protocol.messages import Abort, EngineSampling, Release, StepOut, Submit
from ramet.runtime.protocol.trie import Trie

TOKENS, PARENTS = [4, 5, 6, 7, 6, 8], [-1, 0, 1, 1, -1, 4]
ORDER = sorted(range(6), key=lambda node: PARENTS[node])
SCORE = EngineSampling(max_new_tokens=0)


def trie(tokens=TOKENS, parents=PARENTS):
    return Trie(
        tokens=np.array(tokens, np.int32).tobytes(), parents=np.array(parents, np.int32).tobytes()
    )


class Scores:
    """Listens to what a client is told of tries."""

    def __init__(self, client):
        self.client = client
        self.found = {}
        take = client._take

        def listen(message):
            if isinstance(message, StepOut):
                for piece in message.prompts:
                    values = np.frombuffer(piece.values, np.float32).tolist()
                    self.found.setdefault(piece.rid, {}).update(enumerate(values, piece.start))
            take(message)

        client._take = listen

    def submit(self, rid, prompt, message=None, **fields):
        ids = np.array(prompt, np.int32).tobytes()
        fields = {"sampling": SCORE, "trie": message or trie(), **fields}
        self.client.send(Submit(rid=rid, ids=ids, **fields))

    def run(self, rid, prompt, message=None, **fields):
        self.submit(rid, prompt, message, **fields)
        self.client.pump(lambda: rid in self.client.finished)
        return self.found.get(rid, {})


@pytest.fixture
def scores(started):
    return Scores(started[1]())


@pytest.fixture(scope="session")
def logprob_of(simulated_logprob):
    def value(*tokens):
        return simulated_logprob(tokens[:-1], tokens[-1])

    return value


def paths(prompt):
    found = []
    for token, parent in zip(TOKENS, PARENTS):
        found.append([*(found[parent] if parent >= 0 else prompt), token])
    return found


def test_all_nodes_are_scored_and_it_ends(scores, logprob_of):
    prompt = [1, 2, 3]
    found = scores.run(7, prompt)
    want = [logprob_of(*paths(prompt)[node]) for node in ORDER]
    assert [found[i] for i in range(6)] == pytest.approx(want)
    finish = scores.client.finished[7]
    assert (finish.reason, finish.prompt_tokens, finish.error) == ("length", 3, None)
    assert scores.client.tokens == {}


def test_after_nothing_the_first_have_no_score(scores, logprob_of):
    found = scores.run(7, [])
    assert sorted(found) == [2, 3, 4, 5]
    assert found[2] == pytest.approx(logprob_of(4, 5))


def test_the_handle_keeps_the_prompt_and_none_of_the_nodes(started, scores, expected):
    engine, _ = started
    scores.run(1, [1, 2, 3], keep=5)
    assert scores.client.run(2, [9], 4, base=5, base_len=3) == expected([1, 2, 3, 9], 4, 26)
    scores.client.submit(3, [9], base=5, base_len=4)
    scores.client.pump(lambda: 3 in scores.client.need)
    found = scores.run(4, [8], base=5, base_len=3)
    assert scores.client.finished[4].prompt_tokens == 4
    assert len(found) == 6
    scores.client.send(Release(handles=[5]))
    scores.client.ask(90, "info")
    assert engine.scheduler.memory.usage().held == 0


def test_aborted_it_says_no_more(started, scores):
    engine, _ = started
    engine.runner.delay = 0.05
    scores.submit(1, list(range(20)) * 8, trie(range(20), [-1, *range(19)]))
    scores.client.send(Abort(rids=[1]))
    scores.client.pump(lambda: 1 in scores.client.finished)
    assert scores.client.finished[1].reason == "abort"
    scores.client.ask(90, "info")
    assert engine.scheduler.memory.usage().held == 0


def test_nan_fails_the_request_and_leaves_nothing_cached(started, scores, monkeypatch):
    engine, _ = started
    inner = engine.runner.inner
    score = inner.score
    monkeypatch.setattr(inner, "score", lambda batch, item: score(batch, item) * np.nan)
    assert scores.run(1, [1, 2, 3]) == {}
    assert "NaN" in scores.client.finished[1].error.message
    monkeypatch.setattr(inner, "score", score)
    assert len(scores.run(2, [1, 2, 3])) == 6
    assert scores.client.finished[2].cached_tokens == 0


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"message": trie([4, 26], [-1, 0])}, "token ids"),
        ({"message": trie([4, 5], [0, -1])}, "parent of node 0"),
        ({"message": trie([4], [-1, 0])}, "2 parents for 1"),
        ({"sampling": EngineSampling(max_new_tokens=1)}, "generates"),
        ({"sampling": EngineSampling(max_new_tokens=0, logprob_start=0)}, "generates"),
        ({"message": trie([4] * 300, [-1, *range(299)])}, "continuations 299"),
    ],
)
def test_a_bad_one_is_refused_alone(scores, expected, fields, complaint):
    scores.client.submit(1, [1, 2], 6)
    scores.run(2, [1, 2, 3], **fields)
    assert complaint in scores.client.finished[2].error.message
    scores.client.pump(lambda: 1 in scores.client.finished)
    assert scores.client.tokens[1] == expected([1, 2], 6, 26)
