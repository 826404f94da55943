"""Whose turn a step is, where prompts do not share steps with rows that decode."""

from __future__ import annotations

import pytest
from ramet.runtime.scheduler.turns import MOST_AT_ONCE, MOST_WAITED


@pytest.fixture
def turns(make_world):
    """A world whose steps are written down: "d" for rows that decode, "p" for prompts."""

    def make(decoding: int, **options):
        world = make_world(
            slots=32768, rows=64, context=512, step_tokens=2048, prompt_sizes=(16, 64), **options
        )
        kinds: list[str] = []
        launch = world.runner.launch

        def watch(batch):
            assert batch.num_decodes in (0, len(batch.rows)), "steps of both kinds"
            kinds.append("d" if batch.num_decodes else "p")
            return launch(batch)

        for rid in range(decoding):
            world.add(rid, range(rid * 10, rid * 10 + 10), 200)
        while world.scheduler.waiting or world.scheduler.rows.running < decoding:
            world.step()
        world.runner.launch = watch
        world.step()
        assert kinds == ["d"]
        kinds.clear()

        def after(steps: int) -> str:
            for _ in range(steps):
                world.step()
            return "".join(kinds)

        world.after = after
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
    asked = [world.scheduler._turns.prompts_next(1) for _ in range(2 * MOST_WAITED)]
    assert asked == [False] * len(asked)
