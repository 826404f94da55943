"""The scheduler over a runner that checks every slot a request reads."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ramet.runtime.protocol import ContextLengthError


@pytest.mark.parametrize("overlap", [False, True])
def test_one_request(make_world, overlap):
    world = make_world(overlap=overlap)
    prompt = list(range(100))
    world.add(1, prompt, 20)
    world.run()
    world.check(1, prompt, 20)
    assert world.memory.usage().held == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_the_ladder_of_cached_tokens(make_world, overlap):
    world = make_world(slots=1 << 15, context=8192, step_tokens=512, overlap=overlap)
    seen = []
    for rid, length in enumerate((100, 8000, 8000, 1000, 8100)):
        request = world.add(rid, range(length), 1)
        world.run()
        seen.append(request.cached_tokens)
    assert seen == [0, 100, 7999, 999, 8000]


@pytest.mark.parametrize("step_tokens", [64, 100_000])
def test_siblings_compute_their_prefix_once_the_first_time_too(make_world, step_tokens):
    world = make_world(slots=8192, rows=16, context=2048, step_tokens=step_tokens)
    prefix = list(range(1000))
    prompts = [[*prefix, 2000 + i, *range(20)] for i in range(16)]
    for rid, prompt in enumerate(prompts):
        world.add(rid, prompt, 4)
    world.run()
    for rid, prompt in enumerate(prompts):
        world.check(rid, prompt, 4)
    assert world.runner.computed < 1.1 * (1000 + 16 * (21 + 4))


def test_when_an_owner_is_aborted_the_next_sibling_takes_over(make_world):
    world = make_world(context=2048, step_tokens=64)
    prompts = [[*range(1000), 3000 + i] for i in range(3)]
    for rid, prompt in enumerate(prompts):
        world.add(rid, prompt, 3)
    world.step()
    world.step()
    assert world.scheduler.rows.running == 1
    world.abort(0)
    world.run()
    for rid in (1, 2):
        world.check(rid, prompts[rid], 3)
    assert world.runner.computed < 1.1 * 1000 + 64


def test_strangers_do_not_wait_for_each_other(make_world):
    world = make_world(step_tokens=256)
    for rid in range(4):
        world.add(rid, [rid, *range(50)], 2)
    world.step()
    assert world.scheduler.rows.running == 4


def test_decodes_go_on_while_a_long_prompt_is_prefilled(make_world):
    world = make_world(context=2048, step_tokens=32, slots=4096)
    world.add(0, range(10), 100)
    world.step()
    world.add(1, range(500, 1500), 1)
    before = world.scheduler.rows.known[world.requests[0].row]
    for _ in range(10):
        world.step()
    assert world.scheduler.rows.known[world.requests[0].row] == before + 10


@pytest.mark.parametrize("overlap", [False, True])
def test_a_full_pool_retracts_and_all_finish_right(make_world, overlap):
    world = make_world(slots=256, rows=8, context=256, overlap=overlap, step_tokens=32)
    world.scheduler._admission._ratio = 0.1
    prompts = {rid: [rid, *range(30)] for rid in range(8)}
    for rid, prompt in prompts.items():
        world.add(rid, prompt, 60)
    world.run()
    assert world.scheduler.num_retracted > 0
    for rid, prompt in prompts.items():
        world.check(rid, prompt, 60)
    assert world.memory.usage().held == 0


def test_one_that_alone_cannot_fit_fails_and_says_so(make_world):
    world = make_world(slots=128, context=512)
    world.add(0, range(100), 200)
    world.add(1, range(200, 220), 3)
    world.run()
    assert "max_total_tokens" in str(world.failed[0])
    world.check(1, range(200, 220), 3)


def test_a_prompt_beyond_context_or_memory_is_refused_at_once(make_world):
    world = make_world(slots=256, context=512)
    with pytest.raises(ContextLengthError, match=r"600 tokens; (the context|KV memory) holds"):
        world.add(0, range(600), 1)
    with pytest.raises(ContextLengthError, match="KV memory holds 256"):
        world.add(0, range(300), 1)
    with pytest.raises(ContextLengthError, match="empty"):
        world.add(0, [], 1)
    assert world.scheduler.idle


def test_prompt_logprobs_cover_every_position_once(make_world):
    world = make_world(context=1024, step_tokens=48)
    prompt = list(range(200))
    world.add(0, prompt, 2)
    world.run()
    world.add(1, prompt, 2, logprob_start=0, logprobs=True)
    world.add(2, prompt, 0, logprob_start=150, logprobs=True)
    world.run()
    assert world.scores[1] == [float(p) for p in range(1, 200)]
    assert world.scores[2] == [float(p) for p in range(150, 200)]


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "dfs", "program"])
def test_policies_starve_nobody(make_world, policy):
    world = make_world(policy=policy, rows=2, slots=1024)
    prompts = {rid: [rid % 5, *range(20 + rid)] for rid in range(20)}
    for rid, prompt in prompts.items():
        world.add(rid, prompt, 5)
    world.run()
    for rid, prompt in prompts.items():
        world.check(rid, prompt, 5)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    overlap=st.booleans(),
    caching=st.booleans(),
    page=st.sampled_from([1, 4, 16]),
    eviction=st.sampled_from(["lru", "lfu", "program"]),
)
def test_random_storms_leave_nothing_and_answer_right(
    make_world, seed, overlap, caching, page, eviction
):
    rng = random.Random(seed)
    world = make_world(slots=320, page=page, rows=6, context=160, vocab=7, overlap=overlap,
                       caching=caching, eviction=eviction,
                       step_tokens=rng.choice([8, 40, 200]),
                       prompt_sizes=rng.choice([(), (8, 32)]))  # fmt: skip
    world.scheduler._admission._ratio = 0.1
    stems = [[rng.randrange(7) for _ in range(rng.randint(1, 60))] for _ in range(3)]
    asked = {}
    for rid in range(rng.randint(1, 25)):
        prompt = rng.choice(stems)[: rng.randint(1, 60)] + [
            rng.randrange(7) for _ in range(rng.randint(0, 30))
        ]
        new = rng.randint(0, 40)
        stops = tuple(rng.sample(range(7), rng.randint(0, 1)))
        world.add(rid, prompt, new, stop_ids=stops)
        asked[rid] = (prompt, new, stops)
        for _ in range(rng.randint(0, 6)):
            world.step()
            if rng.random() < 0.15 and world.requests:
                world.abort(rng.choice(list(world.requests)))
    world.run()
    for rid, (prompt, new, stops) in asked.items():
        if rid in world.done:
            world.check(rid, prompt, new, stops)
        else:
            assert rid not in world.requests
    usage = world.memory.usage()
    assert usage.held == 0
    assert usage.free + usage.evictable == usage.total
    world.memory.flush()
    assert world.memory.usage().free == usage.total


def test_positions_of_a_page_share_an_aligned_run(make_world):
    world = make_world(slots=2048, context=512)
    world.add(0, range(100), 40)
    world.run()
    match = world.memory.tree.match(np.arange(100, dtype=np.int32))
    for tile in range(0, 96, 16):
        run = match.slots[tile : tile + 16]
        assert run[0] % 16 == 0
        assert (np.diff(run) == 1).all()


def test_captured_prompt_steps_take_turns_with_decodes(make_world):
    world = make_world(context=2048, step_tokens=512, prompt_sizes=(16, 64), slots=4096)
    world.add(0, range(10), 100)
    world.step()
    world.add(1, range(500, 1500), 1)
    kinds = []
    launch = world.runner.launch

    def watch(batch):
        kinds.append((batch.num_decodes, batch.num_tokens - batch.num_decodes))
        return launch(batch)

    world.runner.launch = watch
    for _ in range(10):
        world.step()
    assert kinds == [(1, 0), (0, 64)] * 5 or kinds == [(0, 64), (1, 0)] * 5
    world.run()
    world.check(1, range(500, 1500), 1)


def test_without_decodes_a_prompt_step_is_as_large_as_allowed(make_world):
    world = make_world(context=2048, step_tokens=512, prompt_sizes=(16, 64), slots=4096)
    world.add(0, range(1000), 1)
    world.step()
    assert world.runner.computed == 512


def test_one_that_does_not_fit_is_no_use_of_what_it_would_share(make_world):
    world = make_world(slots=256, context=512)
    world.add(0, range(64), 1)
    world.run()
    world.add(1, range(500, 650), 60)
    world.step()
    world.add(2, range(100), 150)
    (node,) = [n for n in world.memory.tree.nodes() if n.tokens[0] == 0]
    before = node.hits
    for _ in range(5):
        world.step()
    assert world.scheduler.waiting
    assert node.hits == before
