"""Compiling beside other work: shared, remembered, bounded in time and memory, killable."""

from __future__ import annotations

import gc
import os
import select
import threading
import time
from pathlib import Path

import pytest
from ramet.runtime.grammar import Compiler, Spec
from ramet.runtime.protocol.errors import AbortedError, BackendError, BadInputError, GrammarError

GOOD = Spec("ebnf", 'root ::= "a" root "b" | ""')


def hard(number: int = 0) -> Spec:
    """Takes llguidance minutes and gigabytes: remainders by a large number, each a state."""
    return Spec.of("json_schema", {"type": "integer", "multipleOf": 215_656_441 + number})


def pids(compiler: Compiler) -> list[int]:
    """Of the server, then of what it forked."""
    return compiler._workers.pids()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def until(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "never came true"
        time.sleep(0.01)


def test_submit_does_not_wait_and_the_descriptor_tells(compiler):
    begun = time.monotonic()
    pending = compiler.submit(GOOD)
    assert time.monotonic() - begun < 0.2
    readable, _, _ = select.select([compiler.fileno()], [], [], 30)
    assert readable
    assert pending.done()
    assert pending.result().kind == "llguidance"
    compiler.drain()
    assert not select.select([compiler.fileno()], [], [], 0)[0]


def test_one_flight_for_all_who_ask_and_one_grammar(compiler):
    first = [compiler.submit(GOOD) for _ in range(20)]
    same = Spec.of("json_schema", {"type": "null"})
    spaced = Spec.of("json_schema", '{ "type" : "null" }')
    assert same.key == spaced.key
    grammars = {id(pending.result()) for pending in first}
    assert len(grammars) == 1
    assert compiler.compiled == 1
    assert id(compiler.submit(GOOD).result()) in grammars
    assert compiler.hits == 1
    assert compiler.submit(same).result() is compiler.submit(spaced).result()


def test_errors_are_remembered_and_fresh(compiler):
    bad = Spec.of("json_schema", {"type": "strin"})
    errors = []
    for _ in range(2):
        with pytest.raises(GrammarError) as caught:
            compiler.submit(bad).result()
        errors.append(caught.value)
    assert errors[0] is not errors[1]
    assert str(errors[0]) == str(errors[1])
    assert errors[0].where == "#/type"
    assert compiler.failed == 1


def test_what_takes_too_long_is_killed_and_others_go_on(small):
    compiler = Compiler(small, deadline=2.0)
    try:
        begun = time.monotonic()
        slow = [compiler.submit(hard(i)) for i in range(2)]
        quick = [compiler.submit(Spec.of("json_schema", {"const": i})) for i in range(8)]
        for pending in quick:
            assert pending.wait(30)
            pending.result()
        until(lambda: len(pids(compiler)) == 3)
        server, *before = pids(compiler)
        for pending in slow:
            with pytest.raises(GrammarError, match="too complex"):
                pending.result()
        assert time.monotonic() - begun < 4.0
        until(lambda: not any(map(alive, before)))
        assert compiler.submit(GOOD).result()
        assert pids(compiler) == [server]
        begun = time.monotonic()
        with pytest.raises(GrammarError, match="too complex"):
            compiler.submit(hard(0)).result()
        assert time.monotonic() - begun < 0.5, "the refusal is remembered"
    finally:
        compiler.close()


def test_what_takes_too_much_memory_is_refused(small):
    compiler = Compiler(small, deadline=60.0, memory_limit=400 << 20)
    try:
        begun = time.monotonic()
        with pytest.raises(GrammarError, match="too complex"):
            compiler.submit(hard()).result()
        assert time.monotonic() - begun < 59
        assert compiler.submit(GOOD).result()
    finally:
        compiler.close()


def test_a_process_that_dies_is_replaced(small):
    compiler = Compiler(small, workers=1, deadline=3.0)
    try:
        compiler.submit(GOOD).result()
        [server] = pids(compiler)
        os.kill(server, 9)
        until(lambda: compiler._workers._server.poll() is not None)
        assert compiler.submit(Spec("ebnf", 'root ::= "x"')).result()
        assert pids(compiler) != [server]
        pending = compiler.submit(hard())
        until(lambda: len(pids(compiler)) == 2)
        time.sleep(0.1)
        os.kill(pids(compiler)[1], 9)
        with pytest.raises(GrammarError, match="too complex"):
            pending.result()
        pending = compiler.submit(hard(1))
        until(lambda: len(pids(compiler)) == 2)
        time.sleep(0.1)
        server, trial = pids(compiler)
        os.kill(server, 9)
        until(lambda: not alive(trial))
        until(lambda: len(pids(compiler)) == 2)  # that was not its fault: it is tried again
        assert not {server, trial} & set(pids(compiler))
        with pytest.raises(GrammarError, match="within 3 s"):
            pending.result()
        assert compiler.submit(Spec("ebnf", 'root ::= "y"')).result()
    finally:
        compiler.close()


def test_what_nobody_waits_for_is_not_begun(small):
    compiler = Compiler(small, workers=1, deadline=3.0)
    try:
        compiler.submit(hard())
        waiting = compiler.submit(GOOD)
        kept = compiler.submit(Spec.of("json_schema", {"const": 1}))
        waiting.cancel()
        waiting.cancel()
        assert kept.result()
        with pytest.raises(AbortedError):
            waiting.result()
        assert compiler.submit(GOOD).result()
    finally:
        compiler.close()


def test_close_ends_all_at_once(small):
    compiler = Compiler(small, deadline=60.0)
    pending = compiler.submit(hard())
    until(lambda: bool(pids(compiler)))
    found = pids(compiler)
    begun = time.monotonic()
    compiler.close()
    compiler.close()
    assert time.monotonic() - begun < 10
    with pytest.raises(AbortedError):
        pending.result()
    with pytest.raises(BackendError):
        compiler.submit(GOOD)
    until(lambda: not any(map(alive, found)))


def test_the_cache_is_bounded_by_bytes(small):
    compiler = Compiler(small, cache_bytes=5 << 20)
    try:
        for i in range(6):
            compiler.submit(Spec.of("json_schema", {"const": i})).result()
        assert compiler._cache.nbytes <= 5 << 20
        assert 1 <= len(compiler._cache) < 6
        compiler.submit(Spec.of("json_schema", {"const": 0})).result()
        assert compiler.compiled == 7
        compiler.submit(Spec.of("json_schema", {"const": 0})).result()
        assert compiler.hits == 1
    finally:
        compiler.close()


def test_many_threads_may_ask(compiler):
    specs = [Spec.of("json_schema", {"const": i % 5}) for i in range(40)]
    found: dict[int, object] = {}

    def ask(i: int) -> None:
        found[i] = compiler.submit(specs[i]).result()

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 40
    assert len({id(grammar) for grammar in found.values()}) == 5
    assert compiler.compiled == 5


def test_nothing_is_left_behind(small):
    """No thread, no process and no descriptor of a compiler that is closed."""
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
    for _ in range(3):
        compiler = Compiler(small)
        compiler.submit(GOOD).result()
        compiler.close()
    gc.collect()
    assert (len(list(Path("/proc/self/fd").iterdir())), threading.active_count()) == before


def test_an_unknown_backend_is_refused(small):
    with pytest.raises(BadInputError, match="unknown grammar backend 'x'"):
        Compiler(small, "x")
