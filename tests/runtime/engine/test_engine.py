"""The engine process's loop over a simulated runner and real sockets."""

from __future__ import annotations

import time

import numpy as np
import pytest
import zmq
from ramet.runtime.engine.connections import Connections
from ramet.runtime.engine.loop import Engine
from ramet.runtime.memory.kv_memory import KVMemory
from ramet.runtime.protocol.messages import (
    Abort,
    Ask,
    Credit,
    EngineSampling,
    Release,
    Submit,
)
from ramet.runtime.protocol.sampling import Constraint
from ramet.runtime.scheduler.scheduler import Limits, Scheduler

VOCAB = 26
TOKEN_BYTES = [bytes([97 + i]) for i in range(VOCAB)]


def test_tokens_come_and_requests_end_by_length(started, expected):
    _, connect = started
    client = connect()
    assert client.run(1, [1, 2, 3], 6) == expected([1, 2, 3], 6, VOCAB)
    finish = client.finished[1]
    assert (finish.reason, finish.prompt_tokens, finish.cached_tokens) == ("length", 3, 0)


def test_a_stop_id_ends_it_and_is_the_last_token(started, expected):
    _, connect = started
    client = connect()
    want = expected([1, 2, 3], 10, VOCAB)
    tokens = client.run(1, [1, 2, 3], 10, stop_ids=(want[4],))
    assert tokens == want[: want.index(want[4]) + 1]
    assert client.finished[1].reason == "stop"
    assert client.finished[1].matched == want[4]


def test_stop_ids_do_not_count_before_the_minimum(started, expected):
    _, connect = started
    client = connect()
    want = expected([1, 2, 3], 10, VOCAB)
    tokens = client.run(1, [1, 2, 3], 10, stop_ids=(want[0],), min_new_tokens=1)
    again = want[1:].index(want[0]) + 2 if want[0] in want[1:] else len(want)
    assert tokens == want[:again]


def test_a_stop_string_over_two_tokens_says_where_it_began(started, expected):
    _, connect = started
    client = connect()
    want = expected([5], 12, VOCAB)
    text = b"".join(TOKEN_BYTES[t] for t in want)
    stop = text[5:7]
    begin = text.index(stop)
    tokens = client.run(1, [5], 12, stops=(stop, b"@never"))
    finish = client.finished[1]
    assert (finish.reason, finish.matched, finish.text_bytes) == ("stop", stop, begin)
    assert len(tokens) == begin + 2


def test_handles_continue_a_stream(started, expected):
    _, connect = started
    client = connect()
    first = client.run(1, [1, 2, 3, 4], 5, keep=7)
    again = client.run(2, [9], 5, base=7, base_len=9)
    assert again == expected([1, 2, 3, 4, *first, 9], 5, VOCAB)
    assert client.finished[2].cached_tokens >= 8


def test_a_handle_that_is_not_there_asks_for_tokens(started):
    _, connect = started
    client = connect()
    client.submit(1, [9], base=3, base_len=5)
    client.pump(lambda: client.need == [1])
    client.run(2, [1, 2, 3], keep=3)
    client.submit(3, [9], base=3, base_len=99)
    client.pump(lambda: client.need == [1, 3])
    client.send(Release(handles=[3, 44]))
    client.submit(4, [9], base=3, base_len=2)
    client.pump(lambda: client.need == [1, 3, 4])


def test_an_abort_is_exact_and_quick(started):
    _, connect = started
    client = connect()
    client.submit(1, [1, 2], 200)
    client.submit(11, [1, 2], 200)
    client.pump(lambda: len(client.tokens.get(1, [])) > 2)
    client.send(Abort(rids=[1, 999]))
    client.pump(lambda: 1 in client.finished)
    assert client.finished[1].reason == "abort"
    assert 11 not in client.finished
    client.send(Abort(rids=[11]))
    client.pump(lambda: 11 in client.finished)
    info = client.ask(1, "info").data
    assert info["pages"]["held"] == 0
    assert info["requests"] == {"running": 0, "waiting": 0}


def test_without_credit_steps_are_merged_not_lost(started, expected):
    engine, connect = started
    client = connect(credit=0)
    client.submit(1, [1, 2, 3], 30)
    deadline = time.monotonic() + 10
    while not engine.info()["finished"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    client.send(Credit(steps=1))
    client.pump(lambda: 1 in client.finished)
    assert client.tokens[1] == expected([1, 2, 3], 30, VOCAB)
    assert client.messages == 1


def test_each_connection_hears_only_of_its_own(started, expected):
    _, connect = started
    one, two = connect(), connect()
    one.submit(1, [1], 20, logprobs=True)
    two.submit(1, [2], 20)
    one.pump(lambda: 1 in one.finished)
    two.pump(lambda: 1 in two.finished)
    assert one.tokens[1] == expected([1], 20, VOCAB)
    assert two.tokens[1] == expected([2], 20, VOCAB)
    assert one.logprobs[1] == [-float(t) for t in one.tokens[1]]


def test_a_lost_gateway_frees_its_work(started):
    _, connect = started
    client, other = connect(), connect()
    client.submit(1, [1, 2, 3], 200, keep=1)
    client.pump(lambda: len(client.tokens.get(1, [])) > 2)
    client.socket.close(0)
    deadline = time.monotonic() + 5
    while other.ask(int(time.monotonic() * 1e6), "info").data["requests"]["running"]:
        assert time.monotonic() < deadline
    assert other.ask(1, "info").data["pages"]["held"] == 0


def test_a_lost_gateway_s_handles_are_released(started):
    engine, connect = started
    client = connect()
    client.run(1, [1, 2, 3], keep=1)
    nodes = list(engine.scheduler.memory.tree.nodes())
    assert any(node.pins for node in nodes)
    client.socket.close(0)
    deadline = time.monotonic() + 5
    while any(node.pins for node in nodes):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_bad_request_fails_alone(started):
    _, connect = started
    client = connect()
    client.submit(1, [1, 99], 4)
    client.submit(2, list(range(20)) * 20, 4)
    client.submit(3, [], 4)
    client.submit(4, [1], 300)
    client.pump(lambda: {1, 2, 3, 4} <= set(client.finished))
    assert "token ids must be in [0, 26)" in client.finished[1].error.message
    assert client.finished[2].error.kind == "context_length"
    assert "empty" in client.finished[3].error.message
    assert "301" in client.finished[4].error.message or "300" in client.finished[4].error.message
    assert len(client.run(5, [1], 4)) == 4


def test_a_submission_that_is_no_such_thing_fails_alone(started, expected):
    _, connect = started
    client = connect()
    client.submit(1, [1, 2, 3], 60)
    client.send(Submit(rid=2, ids=b"\0\0\0", sampling=EngineSampling(max_new_tokens=1)))
    client.submit(3, [1], 4, top_k=1 << 40)
    client.submit(4, [1], 4, bias_ids=(VOCAB,), bias_values=(1.0,))
    client.submit(1 << 63, [1], 4)
    client.pump(lambda: {1, 2, 3, 4, 1 << 63} <= set(client.finished))
    assert "whole int32" in client.finished[2].error.message
    assert "top_k" in client.finished[3].error.message
    assert "bias_ids" in client.finished[4].error.message
    assert "request ids" in client.finished[1 << 63].error.message
    assert client.tokens == {1: expected([1, 2, 3], 60, VOCAB)}


def test_a_stop_string_before_the_minimum_is_passed_over(started, expected):
    _, connect = started
    client = connect()
    want = expected([5], 30, VOCAB)
    text = b"".join(TOKEN_BYTES[t] for t in want)
    early, late = text[2:4], text[20:22]
    assert early not in text[4:], "the early one comes again: choose another prompt"
    tokens = client.run(1, [5], 30, stops=(early, late), min_new_tokens=6)
    finish = client.finished[1]
    begin = text.index(late, 5)
    assert (finish.reason, finish.matched, finish.text_bytes) == ("stop", late, begin)
    assert tokens == want[: begin + 2]


def test_an_aborted_request_keeps_no_handle(started):
    _, connect = started
    client = connect()
    client.submit(1, [1, 2, 3], 200, keep=5)
    client.pump(lambda: len(client.tokens.get(1, [])) > 2)
    client.send(Abort(rids=[1]))
    client.submit(2, [9], base=5, base_len=2)
    client.pump(lambda: client.need == [2])


def test_a_step_that_fails_ends_the_engine_and_tells_its_gateways(
    tmp_path, simulated_runner, fake_runner, client_class
):
    address = f"ipc://{tmp_path}/engine"
    memory = KVMemory(512, 16)
    scheduler = Scheduler(Limits(max_rows=4, context_length=256), memory)
    runner = fake_runner(simulated_runner(512, 16, 4, 256, VOCAB), False, 0)

    def broken(batch):
        raise RuntimeError("the device fell off")

    runner.launch = broken
    engine = Engine(runner, scheduler, Connections(address, memory.tree), TOKEN_BYTES)
    context = zmq.Context()
    client = client_class(context, address)
    monitor = client.socket.get_monitor_socket(zmq.Event.DISCONNECTED)
    try:
        client.submit(1, [1], 4)
        with pytest.raises(RuntimeError, match="the device fell off"):
            engine.run()
        assert monitor.poll(5000), "the gateway was not told"
    finally:
        client.socket.disable_monitor()
        monitor.close(0)
        client.socket.close(0)
        context.term()


def test_a_request_id_in_use_is_refused(started):
    _, connect = started
    client = connect()
    client.submit(1, [1], 200)
    client.pump(lambda: len(client.tokens.get(1, [])) > 1)
    client.submit(1, [2], 4)
    client.pump(lambda: 1 in client.finished)
    assert "in use" in client.finished[1].error.message


def test_nan_logits_fail_their_own_request(started):
    engine, connect = started
    client = connect()
    engine.runner.nan_rows = {0}
    client.submit(1, [1], 50)
    client.submit(2, [2], 50)
    client.pump(lambda: {1, 2} <= set(client.finished))
    failed = [rid for rid in (1, 2) if client.finished[rid].error is not None]
    assert len(failed) == 1
    assert "NaN" in client.finished[failed[0]].error.message


def test_flush_refuses_while_in_use_and_forgets_when_idle(started):
    _, connect = started
    client = connect()
    client.submit(1, [1, 2, 3], 200)
    client.pump(lambda: len(client.tokens.get(1, [])) > 1)
    assert "in use" in client.ask(1, "flush").error.message
    client.send(Abort(rids=[1]))
    client.pump(lambda: 1 in client.finished)
    deadline = time.monotonic() + 5
    number = 10
    while client.ask(number, "flush").error is not None:
        number += 1
        assert time.monotonic() < deadline
    pages = client.ask(2, "info").data["pages"]
    assert pages["free"] == pages["total"]


def test_garbage_does_not_stop_the_loop(started):
    _, connect = started
    client = connect()
    client.socket.send(b"\xff\x00 not msgpack")
    client.socket.send_multipart([b"a", b"b", b""])
    assert len(client.run(1, [1], 3)) == 3


def test_beats_come_when_idle(started):
    _, connect = started
    client = connect()
    client.pump(lambda: client.beats >= 2, seconds=5)


def test_what_gave_nan_is_computed_again(started, expected):
    engine, connect = started
    client = connect()
    prompt = list(range(20))
    engine.runner.nan_rows = {0, 1, 2, 3}
    client.submit(1, prompt, 5)
    client.pump(lambda: 1 in client.finished)
    engine.runner.nan_rows = set()
    assert client.run(2, prompt, 5) == expected(prompt, 5, VOCAB)
    assert client.finished[2].cached_tokens == 0


def ids_of(*tokens):
    return np.array(tokens, np.int32).tobytes()


def test_a_request_that_asks_is_told_where_it_left_the_cache(started):
    _, connect = started
    client = connect()
    client.run(1, [1, 2, 3, 4, 5], 2)
    sampling = EngineSampling(max_new_tokens=2)
    client.send(Submit(rid=2, ids=ids_of(1, 2, 9, 4), sampling=sampling, explain=True))
    client.pump(lambda: 2 in client.finished)
    found = client.finished[2].divergence
    assert (found.index, found.reason, found.neighbour[:3]) == (2, "differs", (3, 4, 5))
    assert client.finished[2].cached_tokens == 2
    client.run(3, [1, 2, 3, 4, 5], 2)
    assert client.finished[3].divergence is None


def test_the_tree_is_asked_about_while_requests_run(started):
    _, connect = started
    client = connect()
    client.submit(1, [1, 2, 3], 60)
    asked = {"ids": ids_of(1, 2, 7), "everywhere": True}
    client.send(Ask(id=5, op="explain", **asked))
    client.send(Ask(id=6, op="explain", namespace=b"new", **asked))
    client.send(Ask(id=7, op="tree", limit=5))
    client.send(Ask(id=8, op="tree", limit=0))
    client.pump(lambda: len(client.answers) == 4 and 1 in client.finished)
    assert client.answers[5].data["here"]["index"] in (0, 2)
    assert client.answers[6].data["here"] == {"index": 0, "reason": "empty"}
    assert len(client.answers[7].data["nodes"]) <= 5
    assert "limit" in client.answers[8].error.message


def test_a_scored_prompt_with_nan_fails_and_is_not_cached(started):
    engine, connect = started
    inner = engine.runner.inner
    launch = inner.launch

    def sick(batch):
        result = launch(batch)
        for found in result.prompt_logprobs:
            found.values[-1] = np.nan
        return result

    inner.launch = sick
    client = connect()
    client.run(1, range(20), 0, logprob_start=0)
    error = client.finished[1].error
    assert error is not None
    assert "NaN" in error.message
    assert engine.scheduler.memory.peek(np.arange(20, dtype=np.int32), b"") == 0


def test_what_breaks_while_a_request_begins_is_its_own_error(started, letters, caplog):
    """No file left for the first grammar's process, say."""
    engine, connect = started
    client = connect()

    def no_files(spec):
        raise OSError(24, "Too many open files")

    letters.submit = no_files
    asked = Constraint("regex", "abc")
    assert client.run(1, [1, 2], 4, constraint=asked) == []
    assert "OSError" in client.finished[1].error.message
    assert "Too many open files" in caplog.text
    assert not engine.scheduler.aside
    assert len(client.run(2, [1, 2], 4)) == 4
