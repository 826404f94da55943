"""`select`: where scoring begins, what is averaged, who wins, what is appended."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from ramet.runtime.protocol import (
    BackendError,
    BadInputError,
    ContextLengthError,
    SamplingParams,
)

MEAN = "token_length_normalized"


async def select(context, choices, method=MEAN, boundary="exact"):
    return await context.select(choices, method, boundary, "x")


def _total(score):
    return sum(entry[0] for entry in score.input_token_logprobs)


async def test_scores_are_the_log_probs_of_the_choices_tokens(world, scored, near):
    context = await world.context()
    context.append("p")
    result = await select(context, ["x", "yz"])
    prompt = world.tokenizer.encode("p")
    x, yz = result.meta.choices
    assert near(x.input_token_logprobs[0][0], scored(prompt, 120))
    expected = [scored(prompt, 121), scored([*prompt, 121], 122)]
    assert near(yz.normalized_prompt_logprobs, sum(expected) / 2)
    assert [entry[1:] for entry in yz.input_token_logprobs] == [(121, "y"), (122, "z")]
    best = max((x, yz), key=lambda score: score.normalized_prompt_logprobs)
    assert result.meta.choices[result.index] is best


async def test_a_token_across_the_boundary_is_scored_but_not_counted(world, near):
    """The text is "pab"; with "cd" its end becomes the one token abcd, with "x" it stays ab."""
    encode = world.tokenizer.encode
    context = await world.context()
    context.append("pab")
    result = await select(context, ["cd", "x"])
    merged, apart = result.meta.choices
    assert [entry[1] for entry in merged.input_token_logprobs] == encode("abcd")
    assert [entry[1] for entry in apart.input_token_logprobs] == [*encode("ab"), *encode("x")]
    assert near(merged.normalized_prompt_logprobs, _total(merged))
    assert near(apart.normalized_prompt_logprobs, _total(apart))
    assert world.engine.prompts == [encode("p")]


async def test_plain_tokenizes_prompt_and_choice_apart(world):
    encode = world.tokenizer.encode
    context = await world.context()
    context.append("pab")
    result = await select(context, ["cd", "x"], boundary="plain")
    assert [entry[1] for entry in result.meta.choices[0].input_token_logprobs] == encode("cd")
    assert world.engine.prompts == [encode("pab")]


async def test_scoring_never_goes_back_over_generated_tokens(world):
    world.engine.says("a", "b")
    context = await world.context()
    context.append("p")
    await context.gen(SamplingParams(seed=1), None, None)
    result = await select(context, ["cd", "x"])
    encode = world.tokenizer.encode
    assert [entry[1] for entry in result.meta.choices[0].input_token_logprobs] == encode("cd")
    assert world.engine.prompts[1] == [112, 97, 98]


async def test_the_winners_tokens_are_settled(world):
    context = await world.context()
    context.append("pab")
    result = await select(context, ["cd"])
    assert result.index == 0
    context.append("cd")
    await context.gen(SamplingParams(seed=1, max_new_tokens=1), None, None)
    encode = world.tokenizer.encode
    assert world.engine.prompts[-1] == [112, *encode("abcd"), *encode("cd")]


async def test_equal_choices_are_scored_once_and_the_first_wins(world):
    context = await world.context()
    context.append("p")
    result = await select(context, ["x", "x", "x"])
    assert [len(paths) for paths in world.engine.tries.values()] == [1]
    assert result.index == 0
    assert len(result.meta.choices) == 3


async def test_greedy_goes_token_by_token(world, scored):
    context = await world.context()
    context.append("p")
    choices = ["xa", "ya", "z"]
    result = await select(context, choices, "greedy_token_selection")
    prompt = world.tokenizer.encode("p")
    first = [scored(prompt, world.tokenizer.encode(c)[0]) for c in choices]
    assert result.index == first.index(max(first))
    assert [len(row) for row in result.meta.greedy_logprob_matrix] == [2, 2, 2]


async def test_all_choices_go_in_one_request_that_has_what_they_share_once(world):
    context = await world.context()
    context.append("p")
    await select(context, ["xy", "xyz", "xw", "x", "vx"])
    assert len(world.engine.submits) == 1
    (paths,) = world.engine.tries.values()
    want = ["pv", "pvx", "px", "pxw", "pxy", "pxyz"]
    assert paths == [world.tokenizer.encode(text) for text in want]


async def test_more_than_one_request_may_hold_go_in_several(world, scored, near):
    """What the context leaves for the choices is less than all need at once."""
    context = await world.context()
    prompt = "p" * 480
    context.append(prompt)
    letters = "efghijkm"
    choices = [f"q{one}{other}{one * 6}" for one in letters for other in letters]
    result = await select(context, choices, "greedy_token_selection")
    assert len(world.engine.submits) > 8
    assert world.engine.most_running == 4, "a queue need not take all at once"
    assert sum(s.keep is not None for s in world.engine.submits) == 1
    before = world.tokenizer.encode(prompt)
    for choice, score in zip(choices, result.meta.choices, strict=True):
        tokens = world.tokenizer.encode(choice)
        for place, (value, token, _) in enumerate(score.input_token_logprobs):
            assert token == tokens[place]
            assert near(value, scored([*before, *tokens[:place]], token))
    firsts = {score.input_token_logprobs[0][0] for score in result.meta.choices}
    assert len(firsts) == 1


async def test_what_is_kept_is_the_prompt(world):
    context = await world.context()
    context.append("pq")
    await select(context, ["x", "y"])
    context.append("r")
    await context.gen(SamplingParams(seed=1, max_new_tokens=1), None, None)
    assert world.engine.submits[1].base == world.engine.submits[0].keep
    assert world.engine.submits[1].base_len == 2
    context.close()
    await world.settle(lambda: not world.engine.handles)


async def test_an_engine_that_leaves_something_out_is_not_believed(world, monkeypatch):
    tell = world.engine._trie_logprobs

    def less(*asked):
        told = tell(*asked)
        return msgspec.structs.replace(told, values=told.values[:-4])

    monkeypatch.setattr(world.engine, "_trie_logprobs", less)
    context = await world.context()
    context.append("p")
    with pytest.raises(BackendError, match="did not tell all"):
        await select(context, ["x", "yz"])
    context.close()
    await world.settle(lambda: not world.engine.handles)


async def test_an_engine_that_has_forgotten_is_told_all(world, scored, near):
    context = await world.context()
    context.append("pq")
    await context.gen(SamplingParams(seed=1, max_new_tokens=2), None, None)
    world.engine.forgetful = True
    result = await select(context, ["x", "yz"])
    (output,) = [tokens for tokens in world.engine.outputs.values() if tokens]
    prompt = [*world.engine.prompts[0], *output]
    assert world.engine.prompts[-1] == prompt
    assert near(result.meta.choices[0].input_token_logprobs[0][0], scored(prompt, 120))


async def test_at_the_very_start_the_first_token_has_no_log_prob(world, scored, near):
    context = await world.context()
    result = await select(context, ["xy", "z"])
    first, second = result.meta.choices
    assert first.input_token_logprobs[0][0] is None
    assert near(first.input_token_logprobs[1][0], scored([120], 121))
    assert [value for value, _, _ in second.input_token_logprobs] == [None]
    assert world.engine.prompts == [[]]
    await select(context, ["z"])
    assert world.engine.submits[1].base is None, "nothing was kept of an empty prompt"


async def test_a_select_that_is_cancelled_aborts_its_requests(world):
    world.engine.idle = True
    context = await world.context()
    context.append("p")
    task = asyncio.create_task(select(context, ["x", "y"]))
    await world.settle(lambda: bool(world.engine.running))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await world.settle(lambda: not world.engine.running)
    context.close()


async def test_choices_that_begin_alike_are_not_told_apart_by_rounding(world):
    context = await world.context()
    context.append("p")
    choices = ["x", "xyzw", "xyzv"]
    result = await select(context, choices, "greedy_token_selection")
    firsts = {score.input_token_logprobs[0][0] for score in result.meta.choices}
    assert len(firsts) == 1
    assert [row[:3] for row in result.meta.greedy_logprob_matrix[1:2]] == [
        row[:3] for row in result.meta.greedy_logprob_matrix[2:]
    ]


async def test_unconditional_scores_the_tokens_alone_as_well(world, scored, near):
    context = await world.context()
    context.append("p")
    result = await select(context, ["xy", "z"], "unconditional_likelihood_normalized")
    prompt = world.tokenizer.encode("p")
    x, y, z = 120, 121, 122
    given = [scored(prompt, x), scored([*prompt, x], y)]
    first, second = result.meta.choices
    assert first.unconditional_token_logprobs[0][0] is None
    assert near(first.unconditional_token_logprobs[1][0], scored([x], y))
    expected = (given[0] + given[1] - scored([x], y)) / 2
    assert near(first.normalized_unconditional_prompt_logprobs, expected)
    assert near(second.normalized_unconditional_prompt_logprobs, scored(prompt, z))
    assert world.engine.prompts == [prompt, []]
    after, alone = world.engine.tries.values()
    assert after == [[*prompt, *path] for path in alone]
    assert alone == [[x], [x, y], [z]]


@pytest.mark.parametrize("choices", [[], ["a", ""]])
async def test_no_choice_and_an_empty_one_are_refused(world, choices):
    context = await world.context()
    context.append("p")
    with pytest.raises(BadInputError):
        await select(context, choices)


async def test_a_choice_beyond_the_context_is_refused(world):
    context = await world.context()
    context.append("p" * 510)
    with pytest.raises(ContextLengthError):
        await select(context, ["x", "x" * 10])


async def test_a_select_inside_a_role_takes_special_tokens_as_text(world):
    context = await world.context()
    context.role_begin("assistant")
    result = await select(context, ["<eos>", "x"])
    (eos,) = [c for c in result.meta.choices if c.text == "<eos>"]
    assert [entry[1] for entry in eos.input_token_logprobs] != [world.tokenizer.eos_ids[0]]
    outside = await world.context()
    outside.append("p")
    result = await select(outside, ["<eos>", "x"])
    (eos,) = [c for c in result.meta.choices if c.text == "<eos>"]
    assert [entry[2] for entry in eos.input_token_logprobs] == ["<eos>"]
    assert eos.normalized_prompt_logprobs == pytest.approx(_total(eos))
