"""Text as it comes: pieces join to the whole, stops never leak, log-probs go with their tokens."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ramet.runtime.protocol import SamplingParams


async def stream(context, **changes):
    pieces, metas = [], []

    def on_delta(text, meta):
        pieces.append(text)
        metas.append(meta)

    params = SamplingParams(**{"seed": 1, "max_new_tokens": 40, **changes})
    (result,) = await context.gen(params, None, on_delta)
    return result, pieces, metas


def made_by(world):
    """The text of each finished request, from the engine's own account of it."""
    for finish in world.engine.finished:
        tokens = world.engine.outputs[finish.rid]
        data = b"".join(world.engine.table[token] for token in tokens)
        cut = len(data) if finish.text_bytes < 0 else finish.text_bytes
        yield data[:cut].decode("utf-8", "replace")


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    stops=st.lists(st.sampled_from(["ab", "cd\n", "é", "😀", "l", "x", "abcdl"]), max_size=3),
    minimum=st.sampled_from([0, 0, 5]),
)
def test_pieces_join_to_the_text_and_no_stop_leaks(new_world, seed, stops, minimum):
    async def check() -> None:
        async with new_world() as world:
            dice = random.Random(seed)
            world.engine.chunk = dice.randint(1, 4)
            context = await world.context()
            context.append(f"p{seed}")
            result, pieces, _ = await stream(
                context, stop=tuple(stops), min_new_tokens=minimum, ignore_eos=True
            )
            assert "".join(pieces) == result.text
            (made,) = made_by(world)
            assert result.text == made
            if result.meta.finish_reason.type == "stop":
                assert result.meta.finish_reason.matched in stops
            if not minimum:
                assert not any(stop in result.text for stop in stops)

    asyncio.run(check())


async def test_half_a_character_is_only_replaced_when_a_length_cuts_it(world):
    world.engine.says("a", *"é".encode(), *"😀".encode(), "b")
    context = await world.context()
    context.append("p")
    result, pieces, _ = await stream(context)
    assert result.text == "aé😀b"
    assert "�" not in "".join(pieces)
    cut = await world.context()
    cut.append("p")
    result, pieces, _ = await stream(cut, max_new_tokens=4)
    assert result.text == "aé�" == "".join(pieces)


@pytest.mark.parametrize("late", [False, True])
async def test_a_stop_token_is_held_back_until_the_end_is_known(world, late):
    world.engine.late = late
    world.engine.says("h", "z", "q")
    context = await world.context()
    context.append("p")
    result, pieces, _ = await stream(context, stop_token_ids=(122,))
    assert result.text == "h" == "".join(pieces)


async def test_log_probs_come_with_their_tokens_and_whole_at_the_end(world, scored, near):
    world.engine.says("x", "y", "z")
    context = await world.context()
    context.append("p")
    result, _, metas = await stream(context, return_logprob=True, top_logprobs_num=1)
    entries = [entry for meta in metas for entry in meta.output_token_logprobs]
    assert entries == result.meta.output_token_logprobs
    assert [entry[1:] for entry in entries][:3] == [(120, "x"), (121, "y"), (122, "z")]
    assert entries[3][2] == "<eos>"
    assert near(entries[0][0], scored([112], 120))
    assert [top[0][1] for top in result.meta.output_top_logprobs] == [e[1] for e in entries]
    assert result.meta.input_token_logprobs is None


async def test_log_probs_of_the_prompt(world, scored, near):
    context = await world.context()
    context.append("pqr")
    (result,) = await context.gen(
        SamplingParams(seed=1, max_new_tokens=0, return_logprob=True, logprob_start_len=0),
        None,
        None,
    )
    first, second, third = result.meta.input_token_logprobs
    assert first == (None, 112, "p")
    assert near(second[0], scored([112], 113))
    assert near(third[0], scored([112, 113], 114))
    assert result.text == ""
    assert result.meta.completion_tokens == 0


async def test_without_being_asked_there_are_no_log_probs(world):
    context = await world.context()
    context.append("p")
    result, _, metas = await stream(context)
    assert result.meta.output_token_logprobs is None
    assert set(metas) == {None}


@pytest.mark.parametrize("skip", [True, False])
async def test_special_tokens_are_shown_when_not_skipped(world, skip):
    world.engine.says("a", world.tokenizer.bos_id, "b")
    context = await world.context()
    context.append("p")
    result, pieces, _ = await stream(context, skip_special_tokens=skip)
    assert result.text == ("ab" if skip else "a<bos>b") == "".join(pieces)


async def test_meta_counts_and_times(world):
    world.engine.says("a", "b")
    context = await world.context()
    context.append("pq")
    result, _, _ = await stream(context)
    meta = result.meta
    assert (meta.prompt_tokens, meta.completion_tokens) == (2, 3)
    assert meta.id
    assert 0 <= meta.ttft <= meta.e2e_latency
