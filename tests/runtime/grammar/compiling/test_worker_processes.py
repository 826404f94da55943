"""Processes that try specs: when they compute, when they end, and who ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from ramet.runtime.grammar import Compiler, Spec, process
from ramet.runtime.grammar import compiler as compiler_module
from ramet.runtime.protocol.errors import GrammarError

GOOD = Spec("ebnf", 'root ::= "a" root "b" | ""')
HARD = {"type": "integer", "multipleOf": 215_656_441}

OWNER = """
import sys, time
from ramet.runtime.grammar import Compiler, Spec, Vocabulary
compiler = Compiler(Vocabulary([bytes((i,)) for i in range(256)]))
compiler.submit(Spec.of("json_schema", {"type": "integer", "multipleOf": 215656441}))
while len(compiler._workers.pids()) < 2:
    time.sleep(0.01)
print(*compiler._workers.pids(), flush=True)
time.sleep(60)
"""


def hard(number: int) -> Spec:
    return Spec.of("json_schema", {**HARD, "multipleOf": HARD["multipleOf"] + number})


def trials(compiler: Compiler) -> list[int]:
    return compiler._workers.pids()[1:]


def until(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "never came true"
        time.sleep(0.005)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def goes_last(pid: int) -> bool:
    return os.sched_getscheduler(pid) == os.SCHED_IDLE


def test_the_time_runs_from_when_a_spec_was_asked_for(small):
    """Not from when its turn has come; but then it still gets a moment."""
    compiler = Compiler(small, workers=1, deadline=3.5)
    try:
        begun = time.monotonic()
        slow = [compiler.submit(hard(i)) for i in range(2)]
        quick = compiler.submit(GOOD)
        with pytest.raises(GrammarError, match="too complex"):
            slow[0].result()
        assert 3.0 < time.monotonic() - begun < 4.2
        with pytest.raises(GrammarError, match="too complex"):
            slow[1].result()
        assert 5.0 < time.monotonic() - begun < 6.2, "two seconds when its turn came"
        assert quick.result(), "it waited for longer than it may, and needs only a moment"
    finally:
        compiler.close()


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="Linux has such a class of processes")
def test_a_try_computes_while_nobody_else_wants_to(small):
    compiler = Compiler(small, deadline=2.0)
    try:
        pending = compiler.submit(hard(0))
        until(lambda: bool(trials(compiler)))
        [trial] = trials(compiler)
        until(lambda: goes_last(trial))
        assert not goes_last(compiler._workers.pids()[0]), "a try must begin at once"
        with pytest.raises(GrammarError):
            pending.result()
    finally:
        compiler.close()


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="Linux has such a class of processes")
def test_where_nobody_is_held_up_a_try_has_its_turns(small, monkeypatch):
    monkeypatch.setattr(process, "FAIR_SHARE", 100.0)
    compiler = Compiler(small, deadline=3.0, background=False)
    try:
        pending = compiler.submit(hard(0))
        until(lambda: bool(trials(compiler)))
        before = trials(compiler)
        time.sleep(0.5)
        assert trials(compiler) == before
        assert not goes_last(before[0])
        with pytest.raises(GrammarError, match="too complex"):
            pending.result()
    finally:
        compiler.close()


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="Linux has such a class of processes")
def test_one_that_is_never_let_compute_begins_again_for_a_while(small, monkeypatch):
    monkeypatch.setattr(process, "FAIR_SHARE", 100.0)  # so that every one starves
    monkeypatch.setattr(process, "PATIENCE_SECONDS", 1.0)
    compiler = Compiler(small, deadline=6.0)
    try:
        pending = compiler.submit(hard(0))
        until(lambda: bool(trials(compiler)))
        [first] = trials(compiler)
        until(lambda: bool(trials(compiler)) and trials(compiler) != [first])
        [second] = trials(compiler)
        assert not goes_last(second)
        until(lambda: not alive(first))
        until(lambda: goes_last(second))
        assert trials(compiler) == [second]
        assert compiler.submit(GOOD).result()
        with pytest.raises(GrammarError, match="too complex"):
            pending.result()
        until(lambda: not alive(second))
    finally:
        compiler.close()


def test_that_the_server_starts_slowly_is_no_fault_of_a_spec(small, monkeypatch):
    start = process.Workers._start

    def slowly(workers) -> None:
        time.sleep(1.5)
        start(workers)

    monkeypatch.setattr(process.Workers, "_start", slowly)
    compiler = Compiler(small, deadline=1.0)
    try:
        assert compiler.submit(GOOD).result()
    finally:
        compiler.close()


def test_a_process_tries_one_after_the_other_until_it_has_grown(small, monkeypatch):
    # On a busy machine one that gets no turn would be helped by a second.
    monkeypatch.setattr("ramet.runtime.grammar.process.PATIENCE_SECONDS", 30.0)
    compiler = Compiler(small)
    try:
        pids = set()
        for i in range(6):
            compiler.submit(Spec.of("json_schema", {"const": i})).result()
            [idle] = compiler._workers._idle["llguidance"]
            pids.add(idle.pid)
        assert len(pids) == 1
        kinds = [f"v{i}" for i in range(60)]
        many = {
            "type": "object",
            "properties": {f"key{i}": {"enum": kinds} for i in range(1500)},
            "required": [f"key{i}" for i in range(1500)],
        }
        assert compiler.submit(Spec.of("json_schema", many)).wait(30), "compiled or not"
        assert not compiler._workers._idle["llguidance"], "it holds more than it should"
        until(lambda: not any(map(alive, pids)))
        assert compiler.submit(GOOD).result()
    finally:
        compiler.close()


def test_after_a_while_only_the_server_stays(small, monkeypatch):
    monkeypatch.setattr(compiler_module, "IDLE_SECONDS", 0.2)
    compiler = Compiler(small)
    try:
        compiler.submit(GOOD).result()
        [server] = compiler._workers.pids()
        idle = [child.pid for child in compiler._workers._idle["llguidance"]]
        until(lambda: not any(map(alive, idle)))
        until(lambda: not compiler._threads)
        assert alive(server)
        assert compiler.submit(Spec("ebnf", 'root ::= "x"')).result()
        assert compiler._workers.pids()[0] == server
    finally:
        compiler.close()


def test_an_idle_one_that_died_is_nobody_s_fault(small):
    compiler = Compiler(small)
    try:
        for i in range(4):
            assert compiler.submit(Spec.of("json_schema", {"const": i})).result()
            [idle] = compiler._workers._idle["llguidance"]
            os.kill(idle.pid, signal.SIGKILL)
            until(lambda pid=idle.pid: not alive(pid))
        assert compiler.failed == 0
    finally:
        compiler.close()


def test_a_server_that_answers_no_more_is_replaced(small, monkeypatch):
    monkeypatch.setattr(process, "START_SECONDS", 3.0)
    compiler = Compiler(small)
    try:
        assert compiler.submit(GOOD).result()
        [server] = compiler._workers.pids()
        compiler._workers.rest()
        os.kill(server, signal.SIGSTOP)
        assert compiler.submit(Spec("ebnf", 'root ::= "x"')).result()
        assert compiler._workers.pids() != [server]
        until(lambda: not alive(server))
    finally:
        compiler.close()


def test_they_end_with_the_engine_however_that_ends():
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner.stdout as said:
        pids = [int(word) for word in said.readline().split()]
        assert len(pids) == 2
        assert all(map(alive, pids))
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    until(lambda: not any(map(alive, pids)))


def test_a_try_may_not_take_all_memory(small):
    """Its bound is its own: the server holds the vocabulary, and goes on."""
    compiler = Compiler(small, deadline=60.0, memory_limit=400 << 20)
    try:
        assert compiler.submit(GOOD).result()
        [server] = compiler._workers.pids()
        with pytest.raises(GrammarError, match="over 400 MiB"):
            compiler.submit(hard(0)).result()
        assert compiler.submit(Spec("ebnf", 'root ::= "x"')).result()
        assert compiler._workers.pids() == [server]
    finally:
        compiler.close()
