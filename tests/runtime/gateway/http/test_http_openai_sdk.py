"""The openai SDK, unmodified, against the server."""

from __future__ import annotations

import asyncio

import openai
import pytest

MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "ab<eos>"}]
ONE_TURN = {"temperature": 0, "max_tokens": 12}


async def test_a_completion(site):
    site.engine.says("x", "y", "z")
    done = await site.openai.completions.create(model="fake", prompt="ab", max_tokens=9)
    assert done.object == "text_completion"
    assert done.choices[0].text == "xyz"
    assert done.choices[0].finish_reason == "stop"
    assert done.usage.prompt_tokens == 1
    assert done.usage.completion_tokens == 4
    assert done.usage.total_tokens == 5
    await site.idle()


async def test_max_tokens_is_16_unless_told(site):
    site.engine.next_token = lambda tokens: 97
    done = await site.openai.completions.create(model="fake", prompt="b")
    assert done.choices[0].text == "a" * 16
    assert done.choices[0].finish_reason == "length"


async def test_a_chat_is_rendered_by_the_models_template(site):
    site.engine.says("h", "i")
    done = await site.openai.chat.completions.create(model="fake", messages=MESSAGES)
    assert done.object == "chat.completion"
    assert done.choices[0].message.role == "assistant"
    assert done.choices[0].message.content == "hi"
    tokenizer = site.world.tokenizer
    (prompt,) = site.engine.prompts
    text = tokenizer.apply_chat_template(MESSAGES)
    assert tokenizer.decode(prompt, skip_special=False) == text
    assert tokenizer.id("<eos>") not in prompt  # content holds no special tokens
    assert prompt.count(tokenizer.id("<|im_start|>")) == 3


async def test_content_may_be_parts_and_the_last_message_may_go_on(site):
    site.engine.says("h")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await site.openai.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": parts}, {"role": "assistant", "content": "Yes"}],
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )
    (prompt,) = site.engine.prompts
    text = site.world.tokenizer.decode(prompt, skip_special=False)
    assert text == "<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\nYes"


@pytest.mark.parametrize("n", [1, 3])
async def test_streamed_chat_equals_the_whole(site, n):
    asked = {**ONE_TURN, "model": "fake", "messages": MESSAGES, "n": n, "seed": 3}
    whole = await site.openai.chat.completions.create(**asked)
    stream = await site.openai.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    texts, reasons, usages, roles = [""] * n, [None] * n, [], [0] * n
    async for chunk in stream:
        if not chunk.choices:
            usages.append(chunk.usage)
            continue
        assert chunk.usage is None
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += choice.delta.role == "assistant"
        reasons[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert roles == [1] * n
    (usage,) = usages
    assert usage == whole.usage


@pytest.mark.parametrize("prompt", ["ab", ["ab", "cd"], [97, 98], [[97], [98, 99]]])
async def test_streamed_completions_equal_the_whole(site, prompt):
    asked = {**ONE_TURN, "model": "fake", "prompt": prompt, "n": 2, "seed": 3, "logprobs": 1}
    whole = await site.openai.completions.create(**asked)
    stream = await site.openai.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    count = len(whole.choices)
    assert [choice.index for choice in whole.choices] == list(range(count))
    texts, tokens, offsets = [""] * count, [[] for _ in range(count)], [[] for _ in range(count)]
    usage = None
    async for chunk in stream:
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.logprobs is not None:
                tokens[choice.index] += choice.logprobs.tokens
                offsets[choice.index] += choice.logprobs.text_offset
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs.tokens for choice in whole.choices]
    assert offsets == [choice.logprobs.text_offset for choice in whole.choices]
    assert usage == whole.usage


async def test_chat_logprobs(site, scored):
    site.engine.says("x", "é"[0])
    done = await site.openai.chat.completions.create(
        model="fake", messages=MESSAGES, logprobs=True, top_logprobs=1
    )
    content = done.choices[0].logprobs.content
    (prompt,) = site.engine.prompts
    assert [bytes(token.bytes) for token in content[:-1]] == [b"x", b"\xc3", b"\xa9"]
    assert content[0].logprob == pytest.approx(scored(prompt, ord("x")), abs=1e-5)
    assert content[0].top_logprobs[0].token == "x"


async def test_echo_scores_the_prompt(site, scored):
    done = await site.openai.completions.create(
        model="fake", prompt="abx", echo=True, max_tokens=0, logprobs=1
    )
    (choice,) = done.choices
    assert choice.text == "abx"
    assert choice.finish_reason == "length"
    assert choice.logprobs.tokens == ["ab", "x"]
    assert choice.logprobs.token_logprobs[0] is None
    ids = site.world.tokenizer.encode("abx")
    value = scored(ids[:1], ids[1])
    assert choice.logprobs.token_logprobs[1] == pytest.approx(value, abs=1e-4)
    assert choice.logprobs.top_logprobs[0] is None
    assert choice.logprobs.top_logprobs[1].keys() == {"x"}
    assert choice.logprobs.text_offset == [0, 2]
    assert done.usage.completion_tokens == 0


async def test_a_stop_string_never_leaks_unless_asked_for(site):
    site.engine.says(*"one, two")
    asked = {"model": "fake", "messages": MESSAGES, "stop": [", t"]}
    for extra, text in (({}, "one"), ({"include_stop_str_in_output": True}, "one, t")):
        whole = await site.openai.chat.completions.create(**asked, extra_body=extra)
        assert whole.choices[0].message.content == text
        assert whole.choices[0].finish_reason == "stop"
        assert whole.choices[0].stop_reason == ", t"
        stream = await site.openai.chat.completions.create(**asked, extra_body=extra, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(pieces) == text


async def test_the_sync_client(site):
    site.engine.says("x")

    def ask() -> tuple[list[str], str | None, str]:
        with openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as client:
            models = [model.id for model in client.models.list()]
            done = client.chat.completions.create(model=models[0], messages=MESSAGES)
            stream = client.completions.create(model="fake", prompt="a", stream=True)
            streamed = "".join(chunk.choices[0].text for chunk in stream)
            return models, done.choices[0].message.content, streamed

    assert await asyncio.to_thread(ask) == (["fake"], "x", "x")


async def test_errors_are_those_of_the_sdk(new_site):
    site = await new_site(api_key="right")
    with pytest.raises(openai.NotFoundError) as caught:
        await site.openai.completions.create(model="other", prompt="a")
    assert caught.value.param == "model"
    with pytest.raises(openai.BadRequestError) as caught:
        await site.openai.completions.create(model="fake", prompt="a" * 600)
    assert "maximum context length is 512 tokens" in str(caught.value)
    wrong = openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        await wrong.models.list()
    await wrong.close()
    assert (await site.openai.models.retrieve("fake")).id == "fake"


async def test_64_streams_at_once(site):
    async def one(number: int) -> None:
        asked = {"model": "fake", "prompt": f"p{number}", "max_tokens": 20, "temperature": 0}
        stream = await site.openai.completions.create(**asked, stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
        whole = await site.openai.completions.create(**asked)
        assert whole.choices[0].text == text

    await asyncio.gather(*(one(number) for number in range(64)))
    await site.idle()
