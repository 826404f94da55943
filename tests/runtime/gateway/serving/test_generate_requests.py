"""`Generate`: one prompt without the language."""

from __future__ import annotations

import pytest
from ramet.runtime.protocol.messages import AbortGenerate, Generate, Generated, GenerateFailed

SAMPLING = {"max_new_tokens": 8, "seed": 1, "temperature": 0.0}


@pytest.fixture
async def client(world):
    await world.serve()
    client = world.client()
    await client.greet()
    return client


async def ask(client, **fields):
    fields.setdefault("rid", "r")
    fields["sampling"] = {**SAMPLING, **fields.get("sampling", {})}
    client.send(Generate(**fields))
    return await client.next()


async def test_a_prompt_is_continued(world, client):
    world.engine.says("x", "y")
    reply = await ask(client, prompt="ab<eos>")
    assert reply.texts == ["xy"]
    assert reply.done
    assert reply.output_ids == [[120, 121, world.tokenizer.eos_ids[0]]]
    (meta,) = reply.metas
    assert (meta.id, meta.prompt_tokens, meta.completion_tokens) == ("r", 2, 3)
    assert meta.finish_reason.matched == world.tokenizer.eos_ids[0]


async def test_input_ids_are_used_as_they_are(world, client):
    await ask(client, input_ids=[5, 97, 98])
    assert world.engine.prompts == [[5, 97, 98]]


@pytest.mark.parametrize(
    ("fields", "kind", "word"),
    [
        ({"input_ids": [5, 99999]}, "bad_input", "99999"),
        ({"input_ids": []}, "bad_input", "empty"),
        ({}, "bad_input", "either"),
        ({"prompt": "a", "input_ids": [1]}, "bad_input", "either"),
        ({"prompt": "a" * 512}, "context_length", "512"),
        ({"prompt": "a", "sampling": {"top_p": 3}}, "bad_input", "top_p"),
        (
            {"prompt": "a", "sampling": {"constraint": {"kind": "regex", "spec": "a(?=x)"}}},
            "grammar",
            "look-ahead",
        ),
        (
            {"prompt": "a", "sampling": {"constraint": {"kind": "magic", "spec": "x"}}},
            "grammar",
            "magic",
        ),
        (
            {"prompt": "a", "sampling": {"json_schema": 3}},
            "bad_input",
            "json_schema must be text or a dict, not int",
        ),
        (
            {"prompt": "a", "sampling": {"regex": "a", "ebnf": "x"}},
            "bad_input",
            "at most one constraint",
        ),
    ],
)
async def test_bad_input_fails_the_request_alone(client, fields, kind, word):
    failed = await ask(client, **fields)
    assert isinstance(failed, GenerateFailed)
    assert failed.error.kind == kind
    assert word in failed.error.message
    assert isinstance(await ask(client, prompt="a"), Generated)


async def test_streamed_pieces_hold_what_is_new(world, client):
    world.engine.says("x", "y", "z")
    pieces = [await ask(client, prompt="a", stream=True)]
    while not pieces[-1].done:
        pieces.append(await client.next())
    assert "".join(piece.texts[0] for piece in pieces) == "xyz"
    ids = [token for piece in pieces for token in piece.output_ids[0]]
    assert ids == [120, 121, 122, world.tokenizer.eos_ids[0]]
    assert pieces[-1].metas[0].completion_tokens == 4


async def test_several_samples(world, client):
    reply = await ask(client, prompt="a", sampling={"n": 3})
    assert len(reply.texts) == len(reply.output_ids) == len(reply.metas) == 3
    assert [submit.sampling.seed for submit in world.engine.submits] == [1, 2, 3]
    pieces = [await ask(client, prompt="a", sampling={"n": 2}, stream=True)]
    while not pieces[-1].done:
        pieces.append(await client.next())
    assert ["".join(p.texts[i] for p in pieces) for i in range(2)] == reply.texts[:2]


async def test_nothing_new_scores_only(world, client):
    reply = await ask(
        client,
        prompt="pq",
        sampling={"max_new_tokens": 0, "return_logprob": True, "logprob_start_len": 0},
    )
    assert reply.texts == [""]
    assert reply.output_ids == [[]]
    assert [entry[1] for entry in reply.metas[0].input_token_logprobs] == [112, 113]


async def test_an_abort_hits_exactly_one_request(world, client):
    world.engine.idle = True
    for rid in "abc":
        client.send(Generate(rid=rid, prompt=rid, sampling=SAMPLING))
    await world.settle(lambda: len(world.engine.running) == 3)
    client.send(AbortGenerate(rid="b"))
    client.send(AbortGenerate(rid="unknown"))
    failed = await client.next()
    assert (failed.rid, failed.error.kind) == ("b", "aborted")
    await world.settle(lambda: len(world.engine.running) == 2)
    world.engine.idle = False
    assert {(await client.next()).rid for _ in range(2)} == {"a", "c"}


async def test_a_request_id_is_taken_once_at_a_time(world, client):
    world.engine.idle = True
    client.send(Generate(rid="a", prompt="a", sampling=SAMPLING))
    await world.settle(lambda: len(world.engine.running) == 1)
    failed = await ask(client, rid="a", prompt="b")
    assert "running already" in failed.error.message
    world.engine.idle = False
    assert isinstance(await client.next(), Generated)
    assert isinstance(await ask(client, rid="a", prompt="b"), Generated)


async def test_an_abort_that_comes_with_the_request_is_answered(world, client):
    """Before the request has taken its first step."""
    for number in range(20):
        client.send(Generate(rid=f"r{number}", prompt="ab", sampling=SAMPLING))
        client.send(AbortGenerate(rid=f"r{number}"))
        reply = await client.next()
        assert reply.rid == f"r{number}"
        if isinstance(reply, GenerateFailed):
            assert reply.error.kind == "aborted"
    assert isinstance(await ask(client, prompt="a", rid="r0"), Generated)
