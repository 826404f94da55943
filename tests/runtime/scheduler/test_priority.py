"""Who goes first of the more and the less urgent, and what a class may take."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ramet.runtime.protocol.errors import BadInputError, ContextLengthError, QueueFullError
from ramet.runtime.protocol.messages import EngineSampling
from ramet.runtime.scheduler.classes import CLASSES, PriorityClass, parse_classes
from ramet.runtime.scheduler.policies import by_priority
from ramet.runtime.scheduler.preemption import Preemption
from ramet.runtime.scheduler.request import Request
from ramet.runtime.scheduler.rows import DECODE
from ramet.runtime.scheduler.scheduler import MustDrain
from ramet.runtime.scheduler.waiting import Waiting


def make(rid, prompt=(1, 2, 3), new=4, **fields):
    tokens = np.array(prompt, np.int32)
    return Request(rid, b"c", EngineSampling(max_new_tokens=new), tokens, len(tokens), **fields)


def bounded(world, classes=CLASSES, **limits):
    """The same world with other limits."""
    scheduler = world.scheduler
    classes = {**CLASSES, **classes}
    scheduler.limits = dataclasses.replace(scheduler.limits, classes=classes, **limits)
    scheduler._preemption = Preemption(
        scheduler.rows, scheduler.waiting, scheduler._siblings, classes
    )
    return world


def add(world, rid, *args, **fields):
    request = make(rid, *args, **fields)
    world.scheduler.add(request)
    world.requests[rid] = request
    return request


def rids(requests):
    return [request.rid for request in requests]


def finished(world):
    """The order in which all end."""
    world.run()
    return list(world.done)


# --- order ----------------------------------------------------------------------------------------


def test_lower_goes_first_and_equals_keep_their_order(make_world):
    world = make_world(rows=1)
    for rid, priority in ((1, 5), (2, 0), (3, -1), (4, 0)):
        add(world, rid, [rid] * 5, priority=priority)
    assert finished(world) == [3, 2, 4, 1]


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "dfs", "program"])
def test_interactive_goes_before_batch_whatever_the_policy(make_world, policy):
    world = make_world(rows=1, policy=policy)
    world.add(0, range(30), 1)
    world.run()
    world.done.clear()
    for rid in (1, 2, 3):
        add(world, rid, [*range(30), rid], cls="batch")  # cached, which lpm and dfs prefer
    for rid in (4, 5):
        add(world, rid, [40 + rid] * 8, cls="interactive")
    assert finished(world)[:2] == [4, 5]


def test_without_priorities_nothing_is_sorted():
    waiting = [make(1), make(2, arrival=-100.0), make(3)]
    assert by_priority(waiting, 0.0, 10.0) is waiting
    assert by_priority([], 0.0, 10.0) == []


def test_waiting_is_worth_priority():
    old = make(1, arrival=0.0)
    new = make(2, arrival=95.0)
    old.level = 10
    assert rids(by_priority([old, new], 99.0, 10.0)) == [2, 1]
    assert rids(by_priority([old, new], 101.0, 10.0)) == [1, 2], "the same level: as given"


def test_a_stream_of_urgent_requests_starves_nobody(make_world):
    """Newcomers that are more urgent keep coming; the batch request is taken when it is old."""
    world = bounded(make_world(rows=1), priority_ageing=10.0)
    starved = add(world, 1, range(40, 60), 1, cls="batch")
    for rid in range(2, 14):
        add(world, rid, [rid] * 4, 1)
        if rid == 7:
            starved.arrival -= 101.0  # ten levels, and a second
        world.step()
        assert (1 in world.done) == (rid >= 7)


@given(st.lists(st.tuples(st.integers(-20, 20), st.floats(0, 1000)), max_size=30))
def test_who_is_older_and_as_urgent_is_never_behind(entries):
    waiting = []
    for rid, (level, arrival) in enumerate(sorted(entries, key=lambda entry: entry[1])):
        waiting.append(make(rid, arrival=arrival))
        waiting[-1].level = level
    ordered = rids(by_priority(waiting, 1000.0, 10.0))
    assert sorted(ordered) == rids(waiting)
    for older in waiting:
        for younger in waiting[older.rid + 1 :]:
            if older.level <= younger.level:
                assert ordered.index(older.rid) < ordered.index(younger.rid)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_least_urgent_is_retracted(make_world, overlap):
    """Both want more than there is; the one that is retracted has done more, but is less urgent."""
    world = make_world(slots=96, context=128, overlap=overlap)
    add(world, 1, range(16), 60, cls="batch")
    for _ in range(4):
        world.step()
    add(world, 2, range(20, 36), 60)
    world.run()
    assert world.scheduler.num_retracted
    assert list(world.done) == [2, 1]
    world.check(1, range(16), 60)
    world.check(2, range(20, 36), 60)


# --- making way -----------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("prompt_sizes", [(), (16, 64)])
def test_batch_makes_way_for_interactive(make_world, overlap, prompt_sizes):
    """All rows are taken; the one with least done is sent back, and ends right all the same."""
    world = make_world(rows=2, overlap=overlap, prompt_sizes=prompt_sizes)
    add(world, 1, range(16), 60, cls="batch")
    for _ in range(6):
        world.step()
    add(world, 2, range(20, 36), 60, cls="batch")
    for _ in range(6):
        world.step()
    add(world, 3, range(40, 56), 5)
    assert finished(world) == [3, 1, 2]
    assert world.scheduler.num_retracted == 1
    for rid, prompt, new in ((1, range(16), 60), (2, range(20, 36), 60), (3, range(40, 56), 5)):
        world.check(rid, prompt, new)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("prompt_sizes", [(), (16, 64)])
def test_batch_makes_way_for_want_of_memory(make_world, overlap, prompt_sizes):
    world = make_world(slots=192, context=192, overlap=overlap, prompt_sizes=prompt_sizes)
    for rid in (1, 2):
        add(world, rid, [rid] * 60, 20, cls="batch")
    for _ in range(4):
        world.step()
    add(world, 3, range(40, 120), 5)
    assert finished(world)[0] == 3
    assert world.scheduler.num_retracted >= 1
    for rid in (1, 2):
        world.check(rid, [rid] * 60, 20)
    world.check(3, range(40, 120), 5)


def test_no_more_make_way_than_must(make_world):
    """Where prompts have steps of their own, decodes come in between; nobody else is sent back in
    those."""
    world = make_world(slots=320, context=192, prompt_sizes=(16, 64))
    for rid in (1, 2, 3, 4):
        add(world, rid, [rid] * 60, 16, cls="batch")
    while len(list(world.scheduler.running())) < 4 or world.scheduler.rows.state.max() < DECODE:
        world.step()
    add(world, 5, range(40, 115), 5)
    world.run()
    assert world.scheduler.num_retracted == 1
    world.check(5, range(40, 115), 5)


def test_nobody_makes_way_while_a_step_is_under_way(make_world):
    world = make_world(rows=1)
    add(world, 1, range(16), 30, cls="batch")
    world.step()
    add(world, 2, [1], 2)
    with pytest.raises(MustDrain):
        world.scheduler.plan(drained=False)
    assert rids(world.scheduler.running()) == [1]
    assert rids(world.scheduler.waiting) == [2]
    assert finished(world) == [2, 1]


def test_only_what_is_far_less_urgent_makes_way(make_world):
    world = make_world(rows=1)
    add(world, 1, range(16), 30, priority=9)
    world.step()
    add(world, 2, [1], 2)
    add(world, 3, [2], 2, priority=8)
    assert finished(world) == [1, 2, 3]
    assert world.scheduler.num_retracted == 0


def test_what_was_admitted_for_its_age_is_not_sent_back(make_world):
    """Else newcomers would starve it after all."""
    world = bounded(make_world(rows=1), priority_ageing=10.0)
    old = make(1, range(16), 40, cls="batch")
    old.arrival = -1e6
    world.scheduler.add(old)
    world.requests[1] = old
    world.step()
    for rid in range(2, 12):
        add(world, rid, [rid], 1)
        world.step()
    assert finished(world)[0] == 1
    assert world.scheduler.num_retracted == 0


def test_nobody_makes_way_for_whom_its_class_holds_back(make_world):
    world = bounded(make_world(rows=2), {"narrow": PriorityClass(priority=-50, max_running=1)})
    add(world, 1, range(16), 30, cls="narrow")
    add(world, 2, range(20, 36), 30, cls="batch")
    world.step()
    add(world, 3, range(40, 56), 30, cls="narrow")
    assert finished(world) == [1, 2, 3]
    assert world.scheduler.num_retracted == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_a_storm_of_priorities_leaves_nothing_and_answers_right(make_world, overlap):
    rng = np.random.default_rng(7)
    world = bounded(
        make_world(rows=4, slots=512, context=256, overlap=overlap),
        {"few": PriorityClass(priority=3, max_running=1)},
    )
    wanted = {}
    for rid in range(120):
        prompt = rng.integers(0, 50, rng.integers(1, 90)).tolist()
        new = int(rng.integers(1, 40))
        cls = str(rng.choice(["interactive", "batch", "few"]))
        add(world, rid, prompt, new, cls=cls, priority=int(rng.integers(-30, 31)))
        wanted[rid] = prompt, new
        for _ in range(rng.integers(0, 6)):
            world.step()
        if rng.random() < 0.1 and world.requests:
            victim = int(rng.choice(list(world.requests)))
            world.abort(victim)
            del wanted[victim]
    world.run()
    assert world.scheduler.num_retracted > 5
    for rid in set(wanted) & set(world.done):
        world.check(rid, *wanted[rid])
    assert len(world.done) >= len(wanted)
    assert world.memory.usage().held == 0


# --- bounds of a class ----------------------------------------------------------------------------


def test_a_class_runs_no_more_than_it_may_and_holds_up_nobody(make_world):
    world = bounded(make_world(rows=8), {"batch": PriorityClass(priority=-5, max_running=2)})
    for rid in range(1, 7):
        add(world, rid, [rid] * 4, 30, cls="batch")
    for rid in (7, 8):
        add(world, rid, [rid] * 4, 30)
    world.step()
    world.step()
    assert sorted(rids(world.scheduler.running())) == [1, 2, 7, 8]
    for _ in range(200):
        running = [request.cls for request in world.scheduler.running()]
        assert running.count("batch") <= 2
        if not world.step():
            break
    assert len(world.done) == 8


def test_a_class_waits_in_a_queue_of_its_own(make_world):
    world = bounded(make_world(rows=1), {"batch": PriorityClass(max_queued=2)})
    add(world, 1, cls="batch")
    add(world, 2, cls="batch")
    with pytest.raises(QueueFullError, match=r"class batch is full \(2 requests\)"):
        add(world, 3, cls="batch")
    add(world, 4)
    world.step()
    add(world, 5, cls="batch")  # one has left
    assert len(finished(world)) == 4


def test_a_class_of_short_prompts(make_world):
    world = bounded(make_world(), {"short": PriorityClass(context_length=20, max_queued_tokens=30)})
    with pytest.raises(ContextLengthError, match="class short holds 20"):
        add(world, 1, range(20), cls="short")
    request = add(world, 2, range(15), 100, cls="short")
    assert request.sampling.max_new_tokens == 5, "an answer takes what is left"
    with pytest.raises(QueueFullError, match="30 prompt tokens"):
        add(world, 3, range(16), cls="short")
    add(world, 4, range(15), 1, cls="short")
    world.run()
    assert {rid: len(tokens) for rid, tokens in world.done.items()} == {2: 5, 4: 1}


def test_an_unknown_class_is_named(make_world):
    with pytest.raises(BadInputError, match="no class 'urgent'; there are batch, inter") as caught:
        add(make_world(), 1, cls="urgent")
    assert caught.value.param == "priority"


# --- the queue ------------------------------------------------------------------------------------


def test_the_queue_is_bounded_in_requests_and_tokens(make_world):
    world = bounded(make_world(rows=1), max_waiting=3, max_waiting_tokens=100)
    add(world, 1, range(60))
    with pytest.raises(QueueFullError, match="100 prompt tokens"):
        add(world, 2, range(41))
    add(world, 3, range(40))
    with pytest.raises(QueueFullError, match="100 prompt tokens"):
        add(world, 4, [1])
    world.step()  # the first leaves the queue
    add(world, 5, range(50))
    add(world, 6, [1])
    with pytest.raises(QueueFullError, match="3 requests"):
        add(world, 7, [1])
    assert len(finished(world)) == 4


def test_a_prompt_above_the_bound_may_wait_alone(make_world):
    world = bounded(make_world(rows=1), max_waiting_tokens=10)
    add(world, 1, range(60))
    assert finished(world) == [1]


def test_the_queue_counts_what_comes_and_goes(make_world):
    world = make_world(rows=4, slots=96, context=128)
    add(world, 1, range(16), 60, cls="batch")
    for rid in range(2, 6):
        add(world, rid, [rid] * 16, 50)
    world.abort(4)
    for _ in range(1000):
        queue = world.scheduler.waiting
        assert queue.tokens == sum(request.prompt_len for request in queue)
        for cls in ("batch", "interactive"):
            mine = [request for request in queue if request.cls == cls]
            assert queue.count_of[cls] == len(mine)
            assert queue.tokens_of[cls] == sum(request.prompt_len for request in mine)
        if not world.step() and world.scheduler.idle:
            break
    assert world.scheduler.num_retracted
    assert len(world.done) == 4
    assert world.scheduler.waiting.tokens == 0


def test_a_queue_s_counts_survive_an_absent_request():
    queue = Waiting()
    with pytest.raises(ValueError):
        queue.remove(make(1))
    assert queue.tokens == 0


# --- as a setting ---------------------------------------------------------------------------------


def test_classes_come_as_json():
    classes = parse_classes('{"bulk": {"priority": 3, "max_running": 2}}\n{"batch": {}}')
    assert classes["bulk"] == PriorityClass(priority=3, max_running=2)
    assert classes["batch"] == PriorityClass()
    assert classes["interactive"] == PriorityClass()
    assert parse_classes(None) == CLASSES


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "3", '{"a": 3}', '{"a": {"priority": 1.5}}', '{"a": {"no_such": 1}}',
     '{"": {}}', '{"a\\n": {}}', '{"a": {"max_running": 0}}', '{"a": {"context_length": 1}}',
     '{"a": {"priority": 10000000}}'],
)  # fmt: skip
def test_classes_that_are_none(text):
    with pytest.raises(BadInputError, match="priority_classes") as caught:
        parse_classes(text)
    assert caught.value.param == "priority_classes"
