"""Healing in streams and single prompts: what is taken back, what is shown, what goes on."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ramet.runtime.protocol import ContextLengthError, SamplingParams
from ramet.runtime.protocol.messages import Generate


async def gen(context, on_delta=None, **changes):
    params = SamplingParams(**{"seed": 1, "heal": True, "max_new_tokens": 8, **changes})
    return (await context.gen(params, "x", on_delta))[0]


def asked(world):
    """What the engine was last asked: the prompt, and what its answer has to write again."""
    return world.engine.prompts[-1], world.engine.submits[-1].sampling.heal


async def test_the_end_of_a_literal_is_cut_with_what_follows(world):
    world.engine.says("abcd", "x")
    context = await world.context()
    context.append("p")
    context.append("ab")
    result = await gen(context)
    encode = world.tokenizer.encode
    assert asked(world) == (encode("p"), b"ab")
    assert result.text == "cdx"
    assert (result.meta.prompt_tokens, result.meta.completion_tokens) == (1, 3)
    context.append("!")
    await gen(context, heal=False)
    assert world.engine.prompts[1] == encode("pabcd") + encode("x") + encode("!")


async def test_the_same_token_again_is_the_prompt_s(world):
    world.engine.says("ab", "x")
    context = await world.context()
    context.append("pab")
    result = await gen(context, max_new_tokens=1)
    assert result.text == "x"
    assert (result.meta.prompt_tokens, result.meta.completion_tokens) == (2, 1)
    assert result.meta.finish_reason.type == "length"


async def test_without_it_nothing_is_taken_back(world):
    context = await world.context()
    context.append("pab")
    await gen(context, heal=False)
    assert asked(world) == (world.tokenizer.encode("pab"), b"")
    await gen(context, max_new_tokens=0)
    assert world.engine.submits[-1].sampling.heal == b""


async def test_a_stop_inside_the_spanning_token_leaves_the_literal_whole(world):
    encode = world.tokenizer.encode
    for stop, text in (("c", ""), ("d", "c"), ("cd", "")):
        world.engine.says("abcd", "x")
        context = await world.context()
        context.append("pab")
        result = await gen(context, stop=(stop,))
        assert result.text == text
        assert result.meta.finish_reason.matched == stop
        context.append("!")
        await gen(context, heal=False)
        assert world.engine.prompts[-1] == encode(f"pab{text}!")


async def test_a_stop_token_that_holds_the_literal_leaves_it_whole(world):
    (spanning,) = world.tokenizer.encode("abcd")
    world.engine.says("abcd", "x")
    context = await world.context()
    context.append("pab")
    result = await gen(context, stop_token_ids=(spanning,))
    assert result.text == ""
    assert result.meta.finish_reason.matched == spanning
    context.append("l")
    await gen(context, heal=False)
    assert world.engine.prompts[-1] == world.tokenizer.encode("pabl")


async def test_nothing_generated_is_taken_back(world):
    world.engine.says("x", "ab")
    context = await world.context()
    context.append("p")
    await gen(context)
    await gen(context)
    assert asked(world) == ([*world.tokenizer.encode("px"), *world.tokenizer.encode("ab")], b"")
    context.append("c")
    world.engine.says("cd")
    assert (await gen(context)).text == "d"
    assert world.engine.submits[-1].sampling.heal == b"c"
    assert world.engine.submits[-1].base is not None
    assert world.engine.submits[-1].ids == b""


async def test_text_that_came_with_a_dropped_token_is_no_literal(world):
    world.engine.says("x", "abcd")
    context = await world.context()
    context.append("p")
    assert (await gen(context, stop=("c",))).text == "xab"
    await gen(context)
    assert asked(world) == (world.tokenizer.encode("px") + world.tokenizer.encode("ab"), b"")
    context = await world.context()
    context.append("p")
    await gen(context, stop=("c",))
    context.append("l")
    await gen(context)
    prompt, again = asked(world)
    assert again == b"l"
    assert prompt == world.tokenizer.encode("px") + world.tokenizer.encode("ab")


async def test_markers_and_special_tokens_stay(world):
    encode = world.tokenizer.encode
    context = await world.context()
    context.role_begin("assistant")
    await gen(context)
    start = encode("<|im_start|>assistant\n")
    assert asked(world) == (start, b"")
    context = await world.context()
    context.role_begin("assistant")
    context.append("ab")
    await gen(context)
    assert asked(world) == (start, b"ab")
    context = await world.context()
    context.append("a<eos>")
    await gen(context)
    assert asked(world) == (encode("a<eos>"), b"")
    context = await world.context()
    context.append("a<eos>l")
    await gen(context)
    assert asked(world) == (encode("a<eos>"), b"l")


async def test_a_marker_of_ordinary_tokens_stays(new_world, new_tokenizer):
    """Also one that could go on, and a token that holds some of it."""
    template = "{% for m in messages %}[{{ m.role }}]a{{ m.content }}[/]l{% endfor %}"
    async with new_world(new_tokenizer(template=template)) as world:
        encode = world.tokenizer.encode
        context = await world.context()
        context.role_begin("user")
        children = [context.fork() for _ in range(4)]
        for child, text in zip(children, ("", "b", "bl", "ab")):
            child.append(text)
            await gen(child)
        asked = [(p, s.sampling.heal) for p, s in zip(world.engine.prompts, world.engine.submits)]
        assert asked == [
            (encode("[user]a"), b""),
            (encode("[user]ab"), b""),
            (encode("[user]ab"), b"l"),
            (encode("[user]a"), b"ab"),
        ]
        context.append("x")
        context.role_end("user")
        await gen(context)
        assert world.engine.prompts[-1] == encode("[user]ax[/]l")
        context = await world.context()
        context.role_begin("user")
        context.append("x")
        context.role_end("user")
        context.append("l")  # one token with the marker's
        await gen(context)
        assert world.engine.prompts[-1] == encode("[user]ax[/]ll")


async def test_the_first_token_of_all_stays(world):
    context = await world.context()
    context.append("ab")
    await gen(context)
    assert asked(world) == (world.tokenizer.encode("ab"), b"")
    context = await world.context()
    await gen(context)
    assert asked(world) == ([world.tokenizer.bos_id], b"")


async def test_a_conversation_that_is_rendered_anew_holds_the_literal_once(
    new_world, new_tokenizer
):
    template = (
        "{% for m in messages %}[{{ m.role }}{{ '*' if loop.last else '' }}]{{ m.content }}"
        "{% endfor %}"
    )
    async with new_world(new_tokenizer(template=template)) as world:
        world.engine.says("abcd", "x")
        context = await world.context()
        context.role_begin("assistant")
        context.append("p")
        context.append("ab")
        await gen(context)
        context.role_end("assistant")
        context.role_begin("user")
        context.append("q")
        await gen(context, heal=False)
        last = world.engine.prompts[1]
        assert world.tokenizer.decode(last) == "[assistant]pabcdx[user*]q"
        assert world.tokenizer.encode("abcd")[0] in last


async def test_branches_heal_what_they_were_forked_with(world):
    world.engine.says("abcd", "x")
    context = await world.context()
    context.append("pab")
    child = context.fork()
    child.append("c")
    other = context.fork()
    assert (await gen(other)).text == "cdx"
    assert (await gen(child)).text == "dx"
    assert (await gen(context, heal=False)).text == "abcdx"
    assert [submit.sampling.heal for submit in world.engine.submits] == [b"ab", b"abc", b""]
    for one in (other, child, context):
        one.close()
    await world.settle(lambda: not world.engine.handles)


async def test_samples_each_write_it_again(world):
    world.engine.says("abcd", "x")
    context = await world.context()
    context.append("pab")
    params = SamplingParams(seed=1, heal=True, n=3, max_new_tokens=4)
    results = await context.gen(params, None, None)
    assert [result.text for result in results] == ["cdx"] * 3
    assert [submit.sampling.heal for submit in world.engine.submits] == [b"ab"] * 3


async def test_log_probs_are_of_the_tokens_that_there_are(world):
    world.engine.says("a", "b", "x", "y")
    context = await world.context()
    context.append("pqab")
    metas = []
    result = await gen(
        context,
        lambda _, meta: metas.append(meta),
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=1,
        max_new_tokens=2,
    )
    meta = result.meta
    letters = ([entry[2] for entry in meta.input_token_logprobs], [
        entry[2] for entry in meta.output_token_logprobs
    ])  # fmt: skip
    assert letters == (["p", "q", "a", "b"], ["x", "y"])
    assert len(meta.input_top_logprobs) == 4
    assert len(meta.output_top_logprobs) == 2
    assert all(entry[0] is not None for entry in meta.input_token_logprobs[1:])
    assert (meta.prompt_tokens, meta.completion_tokens) == (4, 2)
    told = [entry for meta in metas for entry in (meta.output_token_logprobs or [])]
    assert told == meta.output_token_logprobs
    (first,) = [meta for meta in metas if meta.input_token_logprobs is not None]
    assert first.input_token_logprobs == meta.input_token_logprobs


@pytest.mark.parametrize("start", range(5))
async def test_log_probs_of_the_prompt_begin_anywhere(world, start):
    """Also among tokens that were taken back."""
    world.engine.says("a", "b", "x", "y")
    context = await world.context()
    context.append("pqrab")
    result = await gen(context, return_logprob=True, logprob_start_len=start, max_new_tokens=1)
    entries = result.meta.input_token_logprobs
    if start == 4:  # where a prompt of four tokens ends: it had no more
        assert entries is None
    else:
        assert [entry[2] for entry in entries] == ["p", "q", "r", "a", "b"][start:]


async def test_a_full_context_is_one_with_healing_too(world):
    for heal in (True, False):
        context = await world.context()
        context.append("p" * 511 + "ab")
        with pytest.raises(ContextLengthError):
            await gen(context, heal=heal)
    world.engine.says("ab", "x", "y")
    context = await world.context()
    context.append("p" * 510 + "ab")
    result = await gen(context, max_new_tokens=50)
    assert result.text == "x"
    assert result.meta.finish_reason.type == "length"


LITERALS = ["p", "ab", "abc", "l", "e", "q eo", "é", " ", "x<eos", "日a"]


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    literals=st.lists(st.sampled_from(LITERALS), min_size=1, max_size=3),
    stops=st.lists(st.sampled_from(["ab", "cd\n", "é", "😀", "l", "x", "abcdl", "b"]), max_size=2),
    minimum=st.sampled_from([0, 0, 3]),
)
def test_the_text_is_the_literal_and_then_the_value(new_world, seed, literals, stops, minimum):
    """However tokens fall, in pieces as at once, and for what is generated next."""

    async def check() -> None:
        async with new_world() as world:
            dice = random.Random(seed)
            world.engine.chunk = dice.randint(1, 4)
            context = await world.context()
            for literal in ["p", *literals]:
                context.append(literal)
            pieces = []
            result = await gen(
                context,
                lambda text, _: pieces.append(text),
                max_new_tokens=dice.randint(3, 12),
                min_new_tokens=minimum,
                stop=tuple(stops),
                ignore_eos=bool(minimum),
            )
            assert "".join(pieces) == result.text
            assert minimum or not any(stop in result.text for stop in stops)
            await gen(context, heal=False, max_new_tokens=1)
            shown = world.tokenizer.decode(world.engine.prompts[-1])
            whole = "p" + "".join(literals) + result.text
            assert shown == whole or "\ufffd" in result.text
            rid = world.engine.submits[0].rid
            heal = len(world.engine.submits[0].sampling.heal)
            made = world.engine.outputs[rid]
            data = b"".join(world.engine.table[token] for token in made)[heal:]
            finish = world.engine.finished[0]
            cut = len(data) if finish.text_bytes < 0 else finish.text_bytes
            assert result.text == data[:cut].decode("utf-8", "replace")
            counts = result.meta.prompt_tokens + result.meta.completion_tokens
            assert counts == len(world.engine.prompts[0]) + len(made)

    asyncio.run(check())


# --- a prompt by itself ---------------------------------------------------------------------------


@pytest.fixture
async def client(world):
    await world.serve()
    client = world.client()
    await client.greet()
    return client


async def ask(client, **fields):
    sampling = {"max_new_tokens": 8, "seed": 1, "heal": True, **fields.pop("sampling", {})}
    client.send(Generate(rid="r", sampling=sampling, **fields))
    return await client.next()


@pytest.mark.parametrize("ids", [False, True])
async def test_a_prompt_is_healed(world, client, ids):
    encode = world.tokenizer.encode
    world.engine.says("ab", "cd", "x")
    prompt = {"input_ids": encode("pab")} if ids else {"prompt": "pab"}
    reply = await ask(client, **prompt)
    assert reply.texts == ["cdx"]
    assert reply.output_ids == [encode("cd") + encode("x") + [world.tokenizer.eos_ids[0]]]
    assert asked(world) == (encode("p"), b"ab")
    assert (reply.metas[0].prompt_tokens, reply.metas[0].completion_tokens) == (2, 3)


async def test_a_prompt_is_healed_in_pieces(world, client):
    world.engine.says("ab", "abcd", "x")
    reply = await ask(client, prompt="pab", stream=True)
    text, ids = "", []
    while not reply.done:
        text += reply.texts[0]
        ids += reply.output_ids[0]
        reply = await client.next()
    assert text == "abcdx"
    assert ids == [*world.tokenizer.encode("abcdx"), world.tokenizer.eos_ids[0]]


async def test_it_is_on_or_off(client):
    for value in ("yes", 1, [True]):
        failed = await ask(client, prompt="a", sampling={"heal": value})
        assert failed.error.kind == "bad_input"
        assert failed.error.param == "heal"
