"""Whose turn a step is, where prompts do not share steps with rows that decode."""

from __future__ import annotations

import random

import numpy as np
import pytest
from ramet.runtime.protocol.messages import EngineSampling
from ramet.runtime.scheduler.classes import CLASSES, PriorityClass
from ramet.runtime.scheduler.request import Request
from ramet.runtime.scheduler.rows import DECODE
from ramet.runtime.scheduler.scheduler import MustDrain
from ramet.runtime.scheduler.turns import MOST_AT_ONCE, MOST_WAITED

NARROW = {**CLASSES, "narrow": PriorityClass(max_running=1)}
PLENTY = {
    "slots": 32768,
    "rows": 64,
    "context": 512,
    "step_tokens": 2048,
    "prompt_sizes": (16, 64),
    "conservativeness": 0.14,
}


def tokens_of(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1000) for _ in range(count)]


@pytest.fixture
def turns(make_world):
    """A world whose steps are written down: "d" for rows that decode, "p" for prompts."""

    def make(decoding: int, *, cls: str = "", new: int = 200, **options):
        world = make_world(**PLENTY | {"classes": NARROW} | options)
        kinds: list[str] = []
        launch = world.runner.launch

        def watch(batch):
            mixed = batch.num_decodes not in (0, len(batch.rows))
            assert not (mixed and world.scheduler.limits.prompt_sizes), "steps of both kinds"
            kinds.append("d" if batch.num_decodes else "p")
            return launch(batch)

        for rid in range(decoding):
            world.add(rid, range(rid * 10, rid * 10 + 10), new, cls=cls)
        while world.scheduler.waiting or len(world.scheduler.rows.decoding) < decoding:
            assert world.step()
            assert not world.done, "not all of them decode at a time"
        world.step()
        world.runner.launch = watch

        def after(steps: int) -> str:
            for _ in range(steps):
                world.step()
            return "".join(kinds)

        world.kinds, world.after = kinds, after
        return world

    return make


@pytest.mark.parametrize("overlap", [False, True])
def test_one_prompt_beside_many_rows_waits_a_few_steps(turns, overlap):
    world = turns(40, overlap=overlap)
    world.add(100, range(5000, 5020), 5)
    assert world.after(MOST_WAITED + 1) == "d" * (MOST_WAITED - 1) + "pd"
    world.run()
    world.check(100, range(5000, 5020), 5)


def test_one_prompt_beside_one_row_comes_at_once(turns):
    world = turns(1)
    world.add(100, range(5000, 5020), 5)
    assert world.after(2) == "pd"


def test_several_prompts_wait_less_than_one(turns):
    world = turns(30)
    for rid in range(100, 110):  # 10, and 10 more a step, against the half of 30
        world.add(rid, range(rid * 100, rid * 100 + 5), 5)
    assert world.after(3) == "dpd"


def test_prompts_that_come_while_others_wait_share_their_step(turns):
    world = turns(40)
    for rid in range(100, 100 + MOST_WAITED):
        world.add(rid, range(rid * 100, rid * 100 + 10), 5)
        kinds = world.after(1)
    assert kinds == "d" * (MOST_WAITED - 1) + "p"
    assert not world.scheduler.waiting


def test_more_prompts_than_rows_that_decode_go_on_for_some_steps(turns):
    world = turns(2)
    for rid in range(100, 130):
        world.add(rid, range(rid * 100, rid * 100 + 64), 5)
    kinds = world.after(MOST_AT_ONCE + 2)
    assert kinds == "p" * MOST_AT_ONCE + "dp"
    world.run()
    for rid in range(100, 130):
        world.check(rid, range(rid * 100, rid * 100 + 64), 5)


def test_a_prompt_that_has_begun_waits_for_one_step_at_most(turns):
    world = turns(40)
    world.add(100, range(5000, 5300), 5)
    kinds = world.after(MOST_WAITED + 6)
    assert kinds[MOST_WAITED - 1 :] == "pdpdpdp"


def test_prompts_without_room_are_not_waited_for(turns):
    """Where every row is taken, who waits is not one whose turn comes."""
    world = turns(64)
    world.add(100, range(5000, 5020), 5)
    assert world.after(12) == "d" * 12
    asked = [world.scheduler._turns.prompts_next() for _ in range(2 * MOST_WAITED)]
    assert asked == [False] * len(asked)


def test_prompts_whose_class_is_full_are_not_waited_for(turns):
    """They do not make one small prompt after another a step of its own."""
    world = turns(20)
    world.add(50, range(900, 910), 400, cls="narrow")
    world.after(MOST_WAITED + 1)
    for rid in range(100, 130):
        world.add(rid, range(rid * 100, rid * 100 + 5), 4, cls="narrow")
    world.kinds.clear()
    for i in range(45):
        world.add(1000 + i, range(i * 7, i * 7 + 5), 1)
        world.step()
    kinds = "".join(world.kinds)
    assert "pp" not in kinds
    assert kinds.count("d") > 30


def test_prompts_without_kv_are_not_waited_for(turns):
    """While two long ones are computed, forty that must wait for their end hold up nobody."""
    world = turns(6, slots=2048, context=1024)
    for rid in range(100, 142):
        world.add(rid, tokens_of(rid, 900), 4)
    assert "ppp" not in world.after(30)


@pytest.mark.parametrize("blocked", [0, 15])
def test_who_was_asked_in_vain_is_asked_again_no_sooner_than_one_that_comes(turns, blocked):
    world = turns(20, new=100, page=1, slots=700)
    world.add(100, tokens_of(1, 480), 20)
    world.after(MOST_WAITED)
    for rid in range(blocked):  # however many wait behind it
        world.add(200 + rid, tokens_of(rid, 400), 20)
    asked = []
    for _ in range(MOST_WAITED - 2 + 5 * (MOST_WAITED - 1)):
        asked.append(world.scheduler._turns.prompts_next())
        world.step()
    assert "p" not in world.kinds
    again = [True] + [False] * (MOST_WAITED - 2)  # the step it was asked for counts as waited
    assert asked == [False] * (MOST_WAITED - 2) + again * 5


def test_a_step_that_must_be_planned_again_takes_no_turn(turns):
    world = turns(20, new=100, page=1, slots=512)
    world.memory.allocate(world.memory.available, 0, -1)
    world.add(100, range(5000, 5010), 4)

    def counters() -> dict[str, int]:
        turns = vars(world.scheduler._turns)
        return {name: value for name, value in turns.items() if isinstance(value, int)}

    before = counters()
    with pytest.raises(MustDrain):
        world.scheduler.plan(drained=False)
    assert counters() == before


def passed_on(world, tokens: list[int]) -> Request:
    """What follows the output of a row, in that row."""
    sampling = EngineSampling(max_new_tokens=50)
    then = Request(501, b"c", sampling, np.array(tokens, np.int32), len(tokens))
    leader = world.add(500, range(5000, 5010), 100, then=then)
    while leader.row < 0 or world.scheduler.rows.known[leader.row] < 13:
        world.step()
    assert world.scheduler.go_on(leader, 12)
    world.requests[501] = then
    del world.requests[500]
    world.kinds.clear()
    return then


def test_what_goes_on_waits_like_others_only_until_it_begins(turns):
    world = turns(40)
    passed_on(world, tokens_of(1, 300))
    kinds = world.after(MOST_WAITED + 8)
    assert kinds[MOST_WAITED - 1 :].startswith("pdpdpdpdp")


def test_forced_output_of_what_went_on_waits_for_one_step_at_most(turns):
    world = turns(12)
    then = passed_on(world, tokens_of(1, 5))
    while world.scheduler.rows.state[then.row] != DECODE:
        world.step()
    world.step()
    world.kinds.clear()
    assert world.scheduler.append_forced(then.row, np.arange(30, dtype=np.int32))
    assert "p" in world.after(2)


def test_an_urgent_prompt_does_not_wait_for_rows_that_are_less_so(turns):
    world = turns(40, cls="batch")
    world.add(100, range(5000, 5005), 4)
    assert world.after(1) == "p"


def test_urgent_rows_wait_for_prompts_that_are_less_so_as_little_as_they_can(turns):
    world = turns(4)
    for rid in range(100, 150):
        world.add(rid, tokens_of(rid, 60), 4, cls="batch")
    assert world.after(12) == ("d" * (MOST_WAITED - 1) + "p") * 3


def test_an_urgent_prompt_goes_before_the_rest_of_a_long_one_that_is_less_so(turns):
    world = turns(10)
    long = world.add(100, tokens_of(1, 500), 4, cls="batch")
    world.after(6)
    assert long.row >= 0
    urgent = world.add(101, range(5), 4)
    world.after(MOST_WAITED)
    assert urgent.admitted
    assert world.scheduler.rows.computed[long.row] < 500
    world.run()
    world.check(100, tokens_of(1, 500), 4)
    world.check(101, range(5), 4)


def test_who_somebody_made_way_for_does_not_wait_for_a_turn_as_well(turns):
    def steps(sizes: tuple[int, ...]) -> int:
        world = turns(
            24, cls="batch", new=120, page=1, slots=640, rows=32, prompt_sizes=sizes
        )  # fmt: skip
        other = world.add(99, range(5), 300)
        while not world.scheduler.rows.decoding.tolist().count(other.row):
            world.step()
        urgent = world.add(100, range(1000, 1480), 4)
        count = 0
        while not urgent.admitted:
            world.step()
            count += 1
        return count

    assert steps((16, 64)) <= steps(()) + MOST_WAITED
