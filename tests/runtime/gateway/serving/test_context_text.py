"""From text to tokens: what is cut where, and what stays as it was generated."""

from __future__ import annotations

import pytest
from ramet.runtime.protocol import (
    BadInputError,
    ContextLengthError,
    ProgramError,
    SamplingParams,
)

GREEDY = SamplingParams(temperature=0.0, seed=1, max_new_tokens=8)


async def gen(context, **changes):
    return (await context.gen(SamplingParams(**{"seed": 1, **changes}), "x", None))[0]


async def test_only_a_generation_cuts_text(world):
    context = await world.context()
    for piece in ("a", "b", "c", "d"):
        context.append(piece)
    child = context.fork()
    child.append("ab")
    await gen(context)
    await gen(child)
    encode = world.tokenizer.encode
    assert world.engine.prompts == [encode("abcd"), encode("abcdab")]
    assert len(encode("abcd")) == 1


async def test_generated_tokens_stay_as_generated(world):
    world.engine.says("a", "b")
    context = await world.context()
    context.append("x")
    result = await gen(context)
    context.append("!")
    await gen(context)
    assert result.text == "ab"
    ids = [world.tokenizer.id(letter) for letter in "xab!"]
    assert world.engine.prompts[1] == ids
    assert world.tokenizer.encode("xab!") != ids


async def test_a_stop_inside_a_token_drops_it_and_carries_the_text_before(world):
    world.engine.says("x", "abcd", "z")
    context = await world.context()
    context.append("p")
    result = await gen(context, stop=("c",))
    assert result.text == "xab"
    assert result.meta.finish_reason.matched == "c"
    context.append("cd")
    await gen(context)
    encode = world.tokenizer.encode
    assert world.engine.prompts[1] == [*encode("p"), *encode("x"), *encode("abcd")]


async def test_a_stop_that_ends_with_a_token_drops_whole_tokens(world):
    world.engine.says("x", "y", "z")
    context = await world.context()
    context.append("p")
    result = await gen(context, stop=("yz",))
    await gen(context)
    assert result.text == "x"
    assert world.engine.prompts[1] == world.tokenizer.encode("px")


async def test_what_is_carried_over_is_whole_characters(world):
    """The stop "!" is in a token with the second byte of é: é goes back to being text."""
    first, both = "é".encode()[0], world.tokenizer.encode("é!")[1]
    assert world.tokenizer.bytes_table[both] == "é!".encode()[1:]
    world.engine.says("a", first, both, "z")
    context = await world.context()
    context.append("p")
    result = await gen(context, stop=("!",))
    context.append("?")
    await gen(context)
    assert result.text == "aé"
    assert world.engine.prompts[1] == [112, 97, *"é?".encode()]


async def test_a_generated_end_of_turn_is_not_doubled(world):
    tokenizer = world.tokenizer
    end = tokenizer.id("<|im_end|>")
    world.engine.says("h", end)
    context = await world.context()
    assert context.role_begin("user") == "<|im_start|>user\n"
    context.append("hi")
    assert context.role_end("user") == "<|im_end|>\n"
    context.role_begin("assistant")
    result = await gen(context)
    assert context.role_end("assistant") == "<|im_end|>\n"
    await gen(context)
    assert result.text == "h"
    assert result.meta.completion_tokens == 2
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nh<|im_end|>\n"
    assert world.engine.prompts[1] == tokenizer.encode(expected)


async def test_special_tokens_are_parsed_outside_roles_and_never_in_content(world):
    tokenizer = world.tokenizer
    context = await world.context()
    context.append("<eos>")
    context.role_begin("user")
    context.append("<eos>")
    context.role_end("user")
    await gen(context)
    (prompt,) = world.engine.prompts
    assert prompt.count(tokenizer.eos_ids[0]) == 1
    assert prompt[0] == tokenizer.eos_ids[0]
    assert prompt.count(tokenizer.id("<|im_start|>")) == 1


async def test_text_carried_over_is_never_parsed_for_special_tokens(world):
    (token,) = world.tokenizer.encode("<eos>z", special=False)
    world.engine.says("h", token, "!")
    context = await world.context()
    context.append("p")
    result = await gen(context, stop=("z",))
    await gen(context)
    assert result.text == "h<eos>"
    assert world.engine.prompts[1].count(world.tokenizer.eos_ids[0]) == 0
    assert world.tokenizer.decode(world.engine.prompts[1]) == "ph<eos>"


async def test_what_the_tokenizer_prepends_comes_once_at_the_very_start(new_world, new_tokenizer):
    async with new_world(new_tokenizer(prefix=True)) as world:
        bos = world.tokenizer.bos_id
        context = await world.context()
        fork = context.fork()
        context.append("a")
        await gen(context, max_new_tokens=2, ignore_eos=True)
        context.append("b")
        await gen(context)
        fork.append("f")
        await gen(fork)
        chat = await world.context()
        chat.role_begin("user")
        await gen(chat)
        assert [prompt.count(bos) for prompt in world.engine.prompts] == [1, 1, 1, 0]
        assert all(prompt[0] == bos for prompt in world.engine.prompts[:3])


async def test_an_empty_prompt_starts_with_the_first_token(world):
    context = await world.context()
    await gen(context)
    assert world.engine.prompts == [[world.tokenizer.bos_id]]


async def test_a_model_without_a_template_has_no_roles(new_world, new_tokenizer):
    async with new_world(new_tokenizer(template=None)) as world:
        context = await world.context()
        with pytest.raises(ProgramError, match="chat template"):
            context.role_begin("user")


async def test_a_template_that_rewrites_is_rendered_anew_and_says_so(new_world, new_tokenizer):
    template = (
        "{% for m in messages %}[{{ m.role }}{{ '*' if loop.last else '' }}]{{ m.content }}"
        "{% endfor %}"
    )
    async with new_world(new_tokenizer(template=template)) as world:
        world.engine.says("g", "h")
        context = await world.context()
        context.role_begin("user")
        context.append("ab")
        context.role_end("user")
        context.role_begin("assistant")
        await gen(context)
        context.role_end("assistant")
        context.role_begin("user")
        context.append("again")
        await gen(context)
        warned = dict(context.warnings())
        last = world.tokenizer.decode(world.engine.prompts[1])
        assert last == "[user]ab[assistant]gh[user*]again"
        assert "template_rewrites" in warned
        assert context.warnings() == []
        assert world.engine.submits[1].base is None


async def test_a_template_that_strips_content_does_so_here(new_world, new_tokenizer):
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[/]{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    async with new_world(new_tokenizer(template=template)) as world:
        context = await world.context()
        context.role_begin("user")
        context.append(" \n")
        context.append(" a b ")
        context.role_end("user")
        context.role_begin("assistant")
        await gen(context)
        assert world.tokenizer.decode(world.engine.prompts[0]) == "[user]a b[/][assistant]"


async def test_lengths(world):
    context = await world.context()
    context.append("p" * 500)
    result = await gen(context, max_new_tokens=1000, ignore_eos=True)
    assert result.meta.completion_tokens == 12
    assert result.meta.finish_reason.type == "length"
    context.append("q")
    with pytest.raises(ContextLengthError, match=r"513 tokens.*512"):
        await gen(context)
    assert world.engine.submits[0].sampling.max_new_tokens == 12


async def test_an_open_length_is_what_the_context_leaves(world):
    context = await world.context()
    context.append("p" * 100)
    await gen(context)
    assert world.engine.submits[0].sampling.max_new_tokens == 412


async def test_stop_ids_are_the_models_and_the_given_ones(world):
    context = await world.context()
    context.append("p")
    await gen(context, stop_token_ids=(97,))
    await gen(context, stop_token_ids=(97,), ignore_eos=True, max_new_tokens=3)
    first, second = (submit.sampling.stop_ids for submit in world.engine.submits)
    assert set(first) == {*world.tokenizer.eos_ids, 97}
    assert second == (97,)


async def test_token_ids_outside_the_vocabulary_are_refused(world):
    context = await world.context()
    context.append("p")
    with pytest.raises(BadInputError, match="stop_token_ids"):
        await gen(context, stop_token_ids=(99999,))


async def test_a_stop_token_that_is_text_is_not_shown(world):
    world.engine.says("h", "z", "q")
    context = await world.context()
    context.append("p")
    pieces: list[str] = []
    params = SamplingParams(stop_token_ids=(122,), seed=1)
    (result,) = await context.gen(params, None, lambda text, _: pieces.append(text))
    await gen(context)
    assert result.text == "h" == "".join(pieces)
    assert result.meta.finish_reason.matched == 122
    assert world.engine.prompts[1] == world.tokenizer.encode("ph")


async def test_samples_share_the_prompt_and_have_seeds_of_their_own(world):
    context = await world.context()
    context.append("p")
    results = await context.gen(SamplingParams(n=3, seed=40, max_new_tokens=4), None, None)
    assert len(results) == 3
    assert [s.sampling.seed for s in world.engine.submits] == [40, 41, 42]
    assert [s.keep is not None for s in world.engine.submits] == [True, False, False]


async def test_an_unseeded_draw_gets_a_seed(world):
    context = await world.context()
    context.append("p")
    for _ in range(2):
        await context.gen(SamplingParams(max_new_tokens=1), None, None)
    seeds = [submit.sampling.seed for submit in world.engine.submits]
    assert seeds[0] != seeds[1]
    assert all(0 <= seed < 2**31 for seed in seeds)


async def test_namespaces_differ_by_salt(world):
    seen = []
    for salt in (None, "a", "b", "a"):
        context = await world.context(salt)
        context.append("p")
        await gen(context)
        seen.append(world.engine.submits[-1].namespace)
    assert seen[0] == b""
    assert seen[1] == seen[3]
    assert len(set(seen)) == 3
