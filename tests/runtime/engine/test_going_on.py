"""Requests that go on where others end: as if they had been sent with whole prompts."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import numpy as np
import pytest
from ramet.runtime.engine.handles import Handles
from ramet.runtime.engine.submission import MAX_FOLLOWERS, request_of
from ramet.runtime.memory.kv_memory import KVMemory
from ramet.runtime.protocol import BadInputError
from ramet.runtime.protocol.messages import Abort, EngineSampling, Submit
from ramet.runtime.scheduler.scheduler import MustDrain


def ids(tokens):
    return np.array(tokens, np.int32).tobytes()


def submit(rid, tokens, new=4, then=None, keep=None, **sampling):
    return Submit(
        rid=rid,
        ids=ids(tokens),
        sampling=EngineSampling(max_new_tokens=new, **sampling),
        keep=keep,
        then=then,
    )


@pytest.fixture
def expected(expected):
    return lambda prompt, count: expected(list(prompt), count, 26)


@pytest.fixture
def memory_handles():
    return Handles(KVMemory(64, 16).tree)


@pytest.fixture
def engine(started):
    return started[0]


@pytest.fixture
def client(started):
    return started[1]()


def send_back(engine, rid, known, *, evict=False):
    """Have the scheduler send a request back, once so many of its tokens are known, and with
    ``evict`` its KV go. Returns what holds the row as soon as that was done."""
    scheduler, done = engine.scheduler, []
    plan = scheduler.plan

    def sending_back(*, drained=True):
        rows = scheduler.rows
        for row in np.flatnonzero((rows.rid == rid) & (rows.known >= known)).tolist():
            if not done and rows.requests[row] is not None:
                if not drained:
                    raise MustDrain
                scheduler._send_back(row)
                scheduler.memory.tree.evict(512 * evict)
                done.append(row)
        return plan(drained=drained)

    scheduler.plan = sending_back
    return done


def test_three_in_a_line(engine, client, expected):
    prompt = list(range(20))
    line = submit(1, prompt, 5, submit(2, [7, 8], 6, submit(3, [], 4), keep=9))
    client.send(line)
    client.pump(lambda: 3 in client.finished)
    first = expected(prompt, 5)
    second = expected([*prompt, *first, 7, 8], 6)
    third = expected([*prompt, *first, 7, 8, *second], 4)
    assert [client.tokens[rid] for rid in (1, 2, 3)] == [first, second, third]
    assert [client.finished[rid].prompt_tokens for rid in (1, 2, 3)] == [20, 27, 33]
    assert client.finished[2].cached_tokens == 24  # the last token's KV was never needed before
    assert engine.scheduler.idle
    engine.scheduler.assert_consistent()
    assert engine.info()["computed_tokens"] == 20 + 4 + 3 + 5 + 1 + 3
    # What was kept of the second can be gone on with.
    assert client.run(4, [1], 3, base=9, base_len=33) == expected(
        [*prompt, *first, 7, 8, *second, 1], 3
    )


def test_what_ended_it_is_not_read(client, expected):
    prompt = list(range(20))
    whole = expected(prompt, 12)
    at = next(i for i in range(2, 12) if whole[i] not in whole[:i])
    client.send(submit(1, prompt, 12, submit(2, [3], 4), stop_ids=(whole[at],)))
    client.pump(lambda: 2 in client.finished)
    assert client.tokens[1] == whole[: at + 1]
    assert client.tokens[2] == expected([*prompt, *whole[:at], 3], 4)


def test_nor_is_a_stop_string(client, expected):
    prompt = list(range(20))
    whole = expected(prompt, 12)
    text = bytes(97 + token for token in whole)
    client.send(submit(1, prompt, 12, submit(2, [3, 5, 6], 4), stops=(text[5:8],)))
    client.pump(lambda: 2 in client.finished)
    end = text.find(text[5:8])
    assert client.tokens[1] == whole[: end + 3]
    assert client.tokens[2] == expected([*prompt, *whole[:end], 3, 5, 6], 4)


def test_what_a_stop_string_drops_is_not_looked_for(engine, client, expected):
    """A request that was sent back has its output in the tree, and is found there; what goes on
    where it ends begins before the stop string."""
    prompt = list(range(20))
    whole = expected(prompt, 12)
    stop = bytes(97 + token for token in whole[3:9])
    sent_back = send_back(engine, 1, known=26)
    client.send(submit(1, prompt, 12, submit(2, [3, 5, 6, 3, 5, 6], 4), stops=(stop,)))
    client.pump(lambda: 2 in client.finished)
    assert sent_back
    assert client.tokens[1] == whole[:9]
    assert client.tokens[2] == expected([*prompt, *whole[:3], 3, 5, 6, 3, 5, 6], 4)
    assert client.finished[2].cached_tokens == 23


def test_one_that_was_sent_back_shares_its_prompt_again(engine, client, expected):
    """Until then it lies behind an output that is nobody else's."""
    prompt, text = list(range(20)), [3, 5, 6, 7] * 10
    sent_back = send_back(engine, 2, known=66, evict=True)
    client.send(submit(1, prompt, 4, submit(2, text, 100)))
    client.pump(lambda: sent_back and len(client.tokens.get(2, [])) > 12)
    shared = int(engine.scheduler.rows.shared[sent_back[0]])
    assert shared >= 64
    client.pump(lambda: 2 in client.finished)
    assert client.tokens[2] == expected([*prompt, *expected(prompt, 4), *text], 100)


def test_nothing_between_and_nothing_said(client, expected):
    prompt = list(range(20))
    stop = expected(prompt, 1)[0]
    client.send(submit(1, prompt, 4, submit(2, [], 4), stop_ids=(stop,)))
    client.pump(lambda: 2 in client.finished)
    assert client.tokens[1] == [stop]
    assert client.tokens[2] == expected(prompt, 4)


@pytest.mark.parametrize("token_bytes", [[b"ab"] * 26])
def test_a_stop_inside_of_a_token_asks_the_gateway(client, token_bytes):
    client.send(submit(1, range(20), 4, submit(2, [3], 4), stops=(b"ba",)))
    client.pump(lambda: 1 in client.finished and client.need)
    assert client.need == [2]
    client.run(2, [1, 2, 3], 2)


def test_an_abort_ends_the_line(engine, client):
    client.send(submit(1, range(20), 200, submit(2, [3], 4)))
    client.pump(lambda: client.tokens.get(1))
    client.send(Abort(rids=[1, 2]))
    client.pump(lambda: 1 in client.finished)
    client.run(3, range(30), 4)
    assert 2 not in client.finished
    assert 2 not in client.tokens


def test_what_goes_on_can_be_aborted(client):
    client.send(submit(1, range(20), 2, submit(2, [3], 200)))
    client.pump(lambda: client.tokens.get(2))
    client.send(Abort(rids=[2]))
    client.pump(lambda: 2 in client.finished)
    assert client.finished[2].reason == "abort"


def test_what_cannot_fit_is_told_when_it_would_begin(client):
    client.send(submit(1, range(20), 2, submit(2, [3], 250)))
    client.pump(lambda: 2 in client.finished)
    assert client.finished[1].reason == "length"
    assert client.finished[2].error.kind == "context_length"


def test_what_waits_too_long_comes_first(engine, client, expected):
    """Nobody is overtaken for longer than the ageing bound."""
    engine.scheduler.limits = replace(engine.scheduler.limits, ageing=0.0)
    for rid in range(1, 9):
        client.submit(rid, [rid, *range(20)], 8)
    client.send(submit(20, range(20), 8, submit(21, [3], 4)))
    for rid in range(9, 17):
        client.submit(rid, [rid, *range(20)], 8)
    client.pump(lambda: len(client.finished) == 18)
    order = list(client.finished)
    assert order.index(21) > order.index(15)
    assert client.tokens[21] == expected([*range(20), *expected(range(20), 8), 3], 4)


@pytest.mark.parametrize("seed", range(4))
def test_lines_among_others_in_a_small_pool(engine, client, expected, seed):
    draw = random.Random(seed)
    wanted = {}
    rid = 0
    for _ in range(14):
        prompt = [draw.randrange(3) for _ in range(draw.randrange(1, 60))]
        parts = [(draw.choices(range(26), k=draw.randrange(4)), draw.randrange(1, 40))]
        parts += [
            (draw.choices(range(26), k=draw.randrange(4)), draw.randrange(1, 20))
            for _ in range(draw.randrange(4))
        ]
        before = prompt
        message = None
        numbers = range(rid + 1, rid + 1 + len(parts))
        rid += len(parts)
        for number, (text, new) in zip(numbers, parts):
            whole = [*before, *text]
            output = expected(whole, new)
            kept, ending, how = output, draw.random(), {}
            if ending < 0.3:
                stop = draw.choice(output)
                output = output[: output.index(stop) + 1]
                kept, how = output[:-1], {"stop_ids": (stop,)}
            elif ending < 0.7:
                said = bytes(97 + token for token in output)
                at = draw.randrange(len(said))
                stop = said[at : at + draw.randrange(1, 9)]
                kept = output[: said.find(stop)]
                output, how = output[: len(kept) + len(stop)], {"stops": (stop,)}
            wanted[number] = output
            before = [*whole, *kept]
            parts[number - numbers[0]] = (text, new, how)
        for number, (text, new, how) in reversed(list(zip(numbers, parts))):
            first = number == numbers[0]
            message = submit(number, [*prompt, *text] if first else text, new, message, **how)
        client.send(message)
    client.pump(lambda: len(client.finished) == len(wanted), 30)
    assert client.tokens == wanted
    assert not client.need
    engine.scheduler.assert_consistent()


@pytest.mark.parametrize(
    "then",
    [
        {"base": 1},
        {"ids": ids([26])},
        {"ids": b"abc"},
        {"marks": ((1, 0),)},
        {"sampling": EngineSampling(max_new_tokens=0)},
        {"sampling": EngineSampling(max_new_tokens=4, heal=b"x")},
        {"sampling": EngineSampling(max_new_tokens=4, stop_ids=(26,))},
        {"sampling": EngineSampling(max_new_tokens=4, logprob_start=0)},
        {"rid": 1 << 63},
        {"rid": 1},
        {"remaining": 1 << 63},
        {"priority": 1 << 31},
    ],
)
def test_what_no_step_could_compute_is_refused(then, memory_handles):
    fields = {"rid": 2, "ids": b"", "sampling": EngineSampling(max_new_tokens=4), **then}
    message = submit(1, [1], 4, Submit(**fields))
    with pytest.raises(BadInputError):
        request_of(message, b"", memory_handles, 26)


def test_many_that_go_on_are_refused(memory_handles):
    message = submit(100, [1], 2)
    for rid in range(MAX_FOLLOWERS - 1):
        message = submit(rid, [1], 2, message)
    assert request_of(message, b"", memory_handles, 26) is not None
    with pytest.raises(BadInputError):
        request_of(submit(99, [1], 2, message), b"", memory_handles, 26)


def test_what_goes_on_takes_nobody_s_number(started):
    """Or who had it would run on when their gateway is gone, told by nobody."""
    engine, connect = started
    client, other = connect(), connect()
    client.send(submit(2, [5, 6], 40))
    client.send(submit(1, range(20), 2, submit(2, [3], 200)))
    client.pump(lambda: {1, 2} <= client.finished.keys())
    assert len(client.tokens[2]) == 40
    client.socket.close(0)
    for rid in range(7, 12):
        assert len(other.run(rid, [1], 4)) == 4
        time.sleep(0.1)
    assert not engine.scheduler.rows.running
