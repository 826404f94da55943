"""Constrained requests in the engine's loop: waiting, masks, forced tokens, ends, failures."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace

import numpy as np
import pytest
from ramet.runtime.engine.guides import Guides
from ramet.runtime.protocol.messages import Abort
from ramet.runtime.protocol.sampling import Constraint

TEN = "abc xyz q r s t klm ef g h"


def held(spec, **more):
    return {"constraint": Constraint("ebnf", spec), **more}


def text_of(tokens):
    return "".join(chr(97 + t) for t in tokens)


def fits(text, spec):
    places = spec.rstrip("*").split()
    places += [places[-1]] * (len(text) - len(places))
    return all(letter in place for letter, place in zip(text, places))


@pytest.mark.parametrize("jump", [True, False])
def test_an_output_keeps_to_its_grammar_and_stops_when_it_is_done(started, jump):
    _, connect = started
    client = connect()
    tokens = client.run(1, [1, 2, 3], 50, **held(TEN, jump_forward=jump))
    assert fits(text_of(tokens), TEN)
    assert len(tokens) == 10
    finish = client.finished[1]
    assert (finish.reason, finish.matched, finish.error) == ("stop", None, None)
    info = client.ask(1, "info").data
    assert info["output_tokens"] == 10
    assert info["pages"]["held"] == 0
    assert (info["forced_tokens"] > 0) == jump


def test_jumping_gives_the_same_tokens_with_fewer_steps(started):
    engine, connect = started
    client = connect()
    prompts = [[1, 2, 3, i] for i in range(6)]
    spec = "abc d e f g h xyz q r s t klm"
    before = engine.runner.launches
    plain = [client.run(i, p, 50, **held(spec, jump_forward=False)) for i, p in enumerate(prompts)]
    stepped = engine.runner.launches - before
    jumped = [client.run(10 + i, p, 50, **held(spec)) for i, p in enumerate(prompts)]
    assert jumped == plain
    assert engine.runner.launches - before - stepped < 0.7 * stepped


def test_what_is_forced_from_the_start_is_there_before_anything_is_computed(started):
    _, connect = started
    client = connect()
    tokens = client.run(1, [1, 2, 3], 50, **held("h e l l o abc"))
    assert text_of(tokens)[:5] == "hello"
    assert len(tokens) == 6
    assert client.run(2, [1, 2, 3], 50, **held("h i")) == [7, 8]
    assert client.run(3, [1, 2, 3], 1, **held("h i")) == [7]
    assert [client.finished[i].reason for i in (1, 2, 3)] == ["stop", "stop", "length"]


def test_each_row_of_a_mixed_batch_is_as_if_alone(started):
    _, connect = started
    client = connect()
    asks = [
        ([5, 6, 7], {}),
        ([5, 6, 7], held(TEN)),
        ([5, 6], held("ab*", jump_forward=False)),
        ([9], held("x y z w abcdef klm*")),
        ([9, 8], {}),
        ([9, 8, 1], held(TEN, jump_forward=False)),
    ]
    alone = [client.run(i, p, 20, **more) for i, (p, more) in enumerate(asks)]
    for i, (prompt, more) in enumerate(asks):
        client.submit(10 + i, prompt, 20, **more)
    client.pump(lambda: set(range(10, 16)) <= set(client.finished))
    assert [client.tokens[10 + i] for i in range(6)] == alone
    assert len(set(alone[0])) > 6, "a free row is not masked"


def test_without_log_probs_for_each_token_there_is_no_jump(started):
    _, connect = started
    client = connect()
    tokens = client.run(1, [1, 2], 50, **held("h e l l o abc", logprobs=True))
    assert client.logprobs[1] == [-float(t) for t in tokens]
    client.run(2, [1, 2], 50, **held("h e l l o abc", repetition_penalty=1.1))
    assert client.ask(1, "info").data["forced_tokens"] == 0


@pytest.mark.parametrize("jump", [True, False])
def test_max_tokens_and_stop_strings_cut_it_anywhere(started, jump):
    _, connect = started
    client = connect()
    more = held("abc q r s t u v w klm", jump_forward=jump)
    whole = client.run(0, [4], 50, **more)
    for new in range(1, 10):
        assert client.run(new, [4], new, **more) == whole[:new]
        assert client.finished[new].reason == ("length" if new < 9 else "stop")
    for rid, (stop, begin) in enumerate([(b"st", 3), (b"w", 7), (b"qr", 1)], 20):
        tokens = client.run(rid, [4], 50, stops=(stop,), **more)
        finish = client.finished[rid]
        assert (finish.reason, finish.matched, finish.text_bytes) == ("stop", stop, begin)
        assert tokens == whole[: begin + len(stop)]
    tokens = client.run(30, [4], 50, stop_ids=(ord("u") - 97,), **more)
    assert tokens == whole[:6]
    assert client.finished[30].matched == ord("u") - 97
    pages = client.ask(1, "info").data["pages"]
    assert pages["held"] == 0


def test_others_run_while_a_grammar_is_compiled(started, letters, expected):
    _, connect = started
    client = connect()
    client.submit(1, [1, 2], 20, **held("slow abc"))
    assert client.run(2, [5], 6) == expected([5], 6, 26)
    assert client.ask(1, "info").data["requests"] == {"running": 0, "waiting": 1}
    letters.released.set()
    client.pump(lambda: 1 in client.finished)
    assert fits(text_of(client.tokens[1]), "abc")


def test_an_abort_while_the_grammar_is_compiled(started, letters):
    _, connect = started
    client = connect()
    client.submit(1, [1, 2], 20, **held("slow abc"))
    client.submit(2, [1, 2], 20, **held("slow abc"))
    client.pump(lambda: client.ask(time.time_ns(), "info").data["requests"]["waiting"] == 2)
    client.send(Abort(rids=[1]))
    client.pump(lambda: 1 in client.finished)
    assert client.finished[1].error.kind == "aborted"
    assert letters.cancelled == 1
    letters.released.set()
    client.pump(lambda: 2 in client.finished)
    assert client.finished[2].reason == "stop"
    assert 1 not in client.tokens


def test_a_gateway_that_goes_while_its_grammar_is_compiled(started, letters):
    _, connect = started
    client, other = connect(), connect()
    client.submit(1, [1, 2], 20, **held("slow abc"))
    other.pump(lambda: other.ask(time.time_ns(), "info").data["requests"]["waiting"] == 1)
    client.socket.close(0)
    deadline = time.monotonic() + 10
    while other.ask(time.time_ns(), "info").data["requests"]["waiting"]:
        assert time.monotonic() < deadline
    letters.released.set()
    assert other.run(2, [1], 9, **held("abc def"))


def test_a_grammar_that_fails_ends_its_request_alone(started):
    _, connect = started
    client = connect()
    client.submit(1, [1, 2], 20, **held("bad"))
    client.submit(2, [1, 2], 20, constraint=Constraint("magic", "abc"))
    client.submit(3, [1, 2], 20, **held("abc"))
    client.pump(lambda: {1, 2, 3} <= set(client.finished))
    error = client.finished[1].error
    assert (error.kind, error.message, error.where) == ("grammar", "a bad spec", "character 3")
    assert "magic" in client.finished[2].error.message
    assert client.finished[3].reason == "stop"


@pytest.mark.parametrize(
    ("spec", "word"),
    [("abc - xyz", "a limit"), ("abc 0 xyz", "no token"), ("abc ! xyz", "ZeroDivisionError")],
)
def test_a_row_without_tokens_fails_alone(started, spec, word):
    _, connect = started
    client = connect()
    client.submit(1, [1, 2], 20, **held(spec))
    client.submit(2, [1, 2], 20, **held(TEN))
    client.submit(3, [1, 2], 20)
    client.pump(lambda: {1, 2, 3} <= set(client.finished))
    assert word in client.finished[1].error.message
    assert len(client.tokens[1]) <= 2
    assert len(client.tokens[2]) == 10
    assert len(client.tokens[3]) == 20
    assert client.ask(1, "info").data["pages"]["held"] == 0


def test_nothing_is_constrained_up_to_a_text(started, expected):
    _, connect = started
    client = connect()
    free = expected([3, 4], 12, 26)
    after = text_of(free)[5:7]
    begin = text_of(free).index(after) + 2
    constraint = Constraint("ebnf", "abc q r s t u", after=after)
    tokens = client.run(1, [3, 4], 50, constraint=constraint)
    assert tokens[:begin] == free[:begin]
    assert fits(text_of(tokens[begin:]), "abc q r s t u")
    assert len(tokens) == begin + 6


def test_what_ends_thinking_may_be_a_token_without_text(started, expected):
    engine, connect = started
    client = connect()
    free = expected([3, 4], 12, 26)
    mark = free[6]
    engine._guided.guides._names = {mark: b"<end>"}
    texts = engine._endings.token_bytes
    engine._endings.token_bytes = [b"" if t == mark else data for t, data in enumerate(texts)]
    begin = free.index(mark) + 1
    constraint = Constraint("ebnf", "abc q r s", after="<end>")
    tokens = client.run(1, [3, 4], 50, constraint=constraint)
    assert tokens[:begin] == free[:begin]
    assert fits(text_of(tokens[begin:]), "abc q r s")
    assert len(tokens) == begin + 4


def test_the_compiler_is_closed_with_the_engine(started, letters):
    engine, connect = started
    connect().run(1, [1], 5, **held("abc"))
    engine.stop()
    deadline = time.monotonic() + 5
    while not letters.closed:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_retracted_requests_go_on_where_they_were_in_their_grammar(started):
    """Memory for one of them at a time to the end."""
    _, connect = started
    client = connect()
    spec = "abcdef q r s uvw " * 20
    prompts = [[i] * 60 for i in range(4)]
    asks = [held(spec, jump_forward=bool(i % 2)) for i in range(4)]
    alone = [client.run(i, p, 100, **more) for i, (p, more) in enumerate(zip(prompts, asks))]
    for turn in range(1, 9):
        rids = range(10 * turn, 10 * turn + 4)
        for rid, prompt, more in zip(rids, prompts, asks):
            client.submit(rid, prompt, 100, **more)
        client.pump(lambda rids=rids: set(rids) <= set(client.finished), seconds=30)
        assert [client.tokens[rid] for rid in rids] == alone
        if client.ask(turn, "info").data["retracted"]:
            return
    pytest.fail("they never came so close to each other that one had to give way")


def test_a_storm_of_constrained_and_free_requests(started, letters):
    """More than memory holds, aborted and failing in between: what finishes fits, nothing stays."""
    draw = random.Random(5)
    _, connect = started
    client = connect()
    specs = {}
    for rid in range(60):
        prompt = [draw.randrange(26) for _ in range(draw.randrange(1, 80))]
        spec = " ".join(draw.choice(["abc", "x", "q", "defg", "y"]) for _ in range(60))
        kind = draw.randrange(6)
        spec = {0: None, 1: "bad " + spec, 2: "slow " + spec, 3: spec + " -"}.get(kind, spec)
        specs[rid] = spec
        more = {} if spec is None else held(spec, jump_forward=draw.random() < 0.7)
        client.submit(rid, prompt, draw.randrange(1, 80), **more)
        if draw.random() < 0.2:
            client.send(Abort(rids=[draw.randrange(rid + 1)]))
        if rid == 30:
            letters.released.set()
    client.pump(lambda: len(client.finished) == 60, seconds=60)
    reasons = {finish.reason for finish in client.finished.values()}
    assert reasons == {"stop", "length", "abort"}
    for rid, finish in client.finished.items():
        spec = (specs[rid] or "").replace("slow", "")
        text = text_of(client.tokens.get(rid, []))
        if spec and finish.reason != "abort":
            assert fits(text, spec)
            whole = len(text) == len(spec.split())
            assert finish.reason == ("stop" if whole else "length")
    info = client.ask(1, "info").data
    assert info["pages"]["held"] == 0
    assert info["requests"] == {"running": 0, "waiting": 0}


def test_a_row_that_is_another_s_by_now_is_not_filled(letters):
    """Planned for a request whose place a free one has taken before its mask was due."""
    guides = Guides(lambda: letters, ends=(0,))
    free = SimpleNamespace(serial=7)
    rows = SimpleNamespace(requests=[free, None], epoch=np.array([3, 1]))
    planned = SimpleNamespace(
        batch=SimpleNamespace(masked=np.array([0, 1])),
        rows=np.array([0, 1]),
        epochs=np.array([2, 1]),
    )
    out = np.zeros((2, 3), np.int32)
    of, failed = guides.masks(planned, rows, out)
    assert of.tolist() == [0, 0] and failed == []
    assert (out[0] == -1).all() and not out[1].any()
