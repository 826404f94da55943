"""Prefixes that a program will read again: kept, wished for, and given back."""

from __future__ import annotations

import numpy as np
import pytest
from ramet.runtime.engine.handles import Handles
from ramet.runtime.engine.submission import request_of
from ramet.runtime.memory.kv_memory import KVMemory
from ramet.runtime.protocol import BadInputError
from ramet.runtime.protocol.messages import EngineSampling, Submit

NO_SLOTS = np.empty(0, np.int32)


def compute(memory, tokens):
    """As a request does that runs alone."""
    tokens = np.asarray(tokens, np.int32)
    match = memory.hold(tokens, b"")
    fresh = memory.allocate(len(tokens) - match.length, match.length, -1)
    slots = np.concatenate((match.slots, fresh))
    shared = memory.share(match.node, tokens, slots, match.length, b"")
    memory.release(shared.node, NO_SLOTS)
    return shared.node


def cached(memory, tokens):
    return memory.peek(np.asarray(tokens, np.int32), b"")


def test_a_marked_prefix_outlives_what_was_used_later_and_what_follows_it():
    memory = KVMemory(160, eviction="program")
    handles = Handles(memory.tree)
    compute(memory, range(60))
    handles.mark(1, np.arange(40, dtype=np.int32), b"")
    compute(memory, range(100, 160))
    compute(memory, range(200, 280))
    assert cached(memory, range(60)) == 40
    handles.release(1)
    compute(memory, range(300, 390))
    compute(memory, range(400, 460))
    assert cached(memory, range(60)) == 0
    memory.assert_consistent([])
    assert all(node.pins == 0 for node in memory.tree.nodes())


def test_a_mark_takes_in_what_is_computed_after_it():
    memory = KVMemory(160, eviction="program")
    handles = Handles(memory.tree)
    handles.mark(1, np.arange(40, dtype=np.int32), b"")
    compute(memory, range(60))
    handles.renew(1)
    handles.renew(2)
    compute(memory, range(100, 160))
    compute(memory, range(200, 280))
    assert cached(memory, range(60)) == 40
    assert handles.extend(1, 40, NO_SLOTS).tolist() == list(range(40))
    handles.clear()
    assert all(node.pins == 0 for node in memory.tree.nodes())


def test_a_kept_stream_that_was_evicted_is_wished_for_again_when_it_is_computed_again():
    memory = KVMemory(160, eviction="program")
    handles = Handles(memory.tree)
    tokens = np.arange(60, dtype=np.int32)
    handles.keep(1, tokens, compute(memory, tokens), b"")
    compute(memory, range(100, 250))
    assert cached(memory, tokens) < 60
    compute(memory, tokens)
    handles.renew(1)
    compute(memory, range(300, 360))
    compute(memory, range(400, 480))
    assert cached(memory, tokens) == 60
    handles.clear()
    assert all(node.pins == 0 for node in memory.tree.nodes())


def test_what_a_program_no_longer_reads_goes_before_what_another_does():
    """A wish taken back counts at once, not when the leaf would have gone anyway."""
    memory = KVMemory(160, eviction="program")
    handles = Handles(memory.tree)
    for number, start in ((1, 0), (2, 100)):
        tokens = np.arange(start, start + 60, dtype=np.int32)
        compute(memory, tokens)
        handles.mark(number, tokens, b"")
    compute(memory, range(200, 230))
    handles.release(2)
    compute(memory, range(300, 360))
    assert cached(memory, range(60)) == 60
    assert cached(memory, range(100, 160)) == 0


def test_wishes_for_all_memory_do_not_hold_it():
    memory = KVMemory(160, eviction="program")
    handles = Handles(memory.tree)
    for number in range(40):
        tokens = np.arange(number * 100, number * 100 + 70, dtype=np.int32)
        compute(memory, tokens)
        handles.mark(number, tokens, b"")
        memory.assert_consistent([])
    handles.clear()
    assert all(node.pins == 0 for node in memory.tree.nodes())


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"marks": ((1, 4),)}, "marks"),
        ({"marks": ((1, -1),)}, "marks"),
        ({"marks": ((1, 1),) * 257}, "marks"),
        ({"remaining": -1}, "remaining"),
    ],
)
def test_marks_outside_the_prompt_are_refused(wrong, param):
    ids = np.arange(3, dtype=np.int32).tobytes()
    message = Submit(rid=1, ids=ids, sampling=EngineSampling(max_new_tokens=1), **wrong)
    with pytest.raises(BadInputError) as caught:
        request_of(message, b"", Handles(KVMemory(64).tree), 50)
    assert caught.value.param == param


def test_what_its_program_was_to_send_yet_goes_with_a_wish():
    memory = KVMemory(160, eviction="program")
    handles = Handles(memory.tree)
    tokens = np.arange(40, dtype=np.int32)
    node = compute(memory, tokens)
    handles.keep(1, tokens, node, b"", 7)
    assert node.ahead == 7
    handles.mark(2, tokens, b"", 3)
    assert node.ahead == 3
    handles.renew(2, 2)
    assert (node.ahead, node.pins) == (2, 2)


@pytest.mark.parametrize("length", [60, 59, 40, 1, 0])
def test_what_goes_on_from_a_part_of_a_stream_is_looked_for_within_it(length):
    memory = KVMemory(160)
    handles = Handles(memory.tree)
    tokens = np.arange(60, dtype=np.int32)
    compute(memory, tokens[:40])
    handles.keep(1, tokens, compute(memory, tokens), b"")
    near = handles.near(1, length, b"")
    assert near is not None
    assert near.depth() == next(depth for depth in (60, 40, 0) if depth <= length)
    ids = np.arange(100, 103, dtype=np.int32).tobytes()
    sampling = EngineSampling(max_new_tokens=1)
    message = Submit(rid=1, ids=ids, sampling=sampling, base=1, base_len=length)
    request = request_of(message, b"c", handles, 200)
    assert memory.reach(request.tokens, b"", request.near)[1] == length
    assert handles.near(1, length, b"another") is None
    memory.flush()
    assert handles.near(1, length, b"") is None
