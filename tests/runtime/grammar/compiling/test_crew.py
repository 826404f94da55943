"""Threads that do several calls at once."""

from __future__ import annotations

import gc
import threading
import time

import pytest
from ramet.runtime.grammar.crew import Crew


def names():
    return {t for t in threading.enumerate() if t.name.startswith("ramet-masks")}


def test_calls_are_done_at_once_and_in_order():
    crew, meet = Crew(), threading.Barrier(3, timeout=10)
    me = threading.current_thread()
    for _ in range(3):
        threads = crew.run([lambda: meet.wait() is None or threading.current_thread()] * 3)
        assert threads[0] is me
        assert len(set(threads)) == 3
    assert crew.run([lambda i=i: time.sleep((3 - i) / 100) or i for i in range(3)]) == [0, 1, 2]
    assert crew.run([lambda: 7]) == [7]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_error_is_raised_when_all_are_done(at):
    crew, done = Crew(), []

    def call(i):
        if i == at:
            raise KeyError(i)
        time.sleep(0.02)
        done.append(i)

    with pytest.raises(KeyError):
        crew.run([lambda i=i: call(i) for i in range(3)])
    assert len(done) == 2
    assert crew.run([lambda i=i: i for i in range(3)]) == [0, 1, 2]


def test_threads_end_with_their_crew():
    before = names()
    crew = Crew()
    crew.run([lambda: None] * 4)
    mine = names() - before
    assert len(mine) == 3
    del crew
    gc.collect()
    for thread in mine:
        thread.join(10)
        assert not thread.is_alive()
