"""What evaluation harnesses and benchmarks ask of completions."""

from __future__ import annotations

import json
import math

import pytest

PATH = "/v1/completions"


async def asked(site, **body):
    reply = await site.post(PATH, **{"model": "fake", "temperature": 0, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def per_token(scored, ids):
    return [None, *(scored(ids[:place], ids[place]) for place in range(1, len(ids)))]


def close(got, want):
    assert [value is None for value in got] == [value is None for value in want]
    numbers = [(a, b) for a, b in zip(got, want) if a is not None]
    assert all(math.isclose(a, b, abs_tol=1e-4) for a, b in numbers), (got, want)


@pytest.mark.parametrize("most", [0, 1, 3])
async def test_loglikelihood_as_harnesses_ask_for_it(site, scored, most):
    """Ids of several contexts with their continuations; the prompt's log-probs and one token."""
    site.engine.next_token = lambda tokens: 97
    encode = site.world.tokenizer.encode
    prompts = [encode("abxcd"), encode("xll")]
    answer = await asked(site, prompt=prompts, echo=True, max_tokens=most, logprobs=1, seed=1234)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for prompt, text, choice in zip(prompts, ("abxcd", "xll"), answer["choices"]):
        shown = choice["logprobs"]
        whole = [*prompt, *[97] * most]
        assert choice["text"] == text + "a" * most
        assert "".join(shown["tokens"]) == choice["text"]
        close(shown["token_logprobs"], per_token(scored, whole))
        assert len(shown["top_logprobs"]) == len(shown["text_offset"]) == len(whole)
        places = [len("".join(shown["tokens"][:n])) for n in range(len(whole))]
        assert shown["text_offset"] == places
        for token, value, top in list(
            zip(shown["tokens"], shown["token_logprobs"], shown["top_logprobs"])
        )[1:]:
            assert top[token] == value
    total = sum(map(len, prompts))
    assert answer["usage"]["prompt_tokens"] == total
    assert answer["usage"]["completion_tokens"] == 2 * most


async def test_texts_and_ids_are_the_same_prompts(site):
    texts = ["ab", "xcd"]
    ids = [site.world.tokenizer.encode(text) for text in texts]
    ways = (texts, ids)
    answers = [await asked(site, prompt=way, max_tokens=5, echo=True) for way in ways]
    assert [c["text"] for c in answers[0]["choices"]] == [c["text"] for c in answers[1]["choices"]]
    one = await asked(site, prompt=ids[0], max_tokens=5, echo=True)
    assert one["choices"][0]["text"] == answers[0]["choices"][0]["text"]


async def test_samples_of_several_prompts_are_numbered_prompt_by_prompt(site):
    answer = await asked(
        site, prompt=["ab", "cd"], n=3, seed=5, temperature=1, max_tokens=4, return_token_ids=True
    )
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    seeds = [submit.sampling.seed for submit in site.engine.submits]
    assert sorted(seeds) == [5, 5, 6, 6, 7, 7]
    made = sum(len(choice["token_ids"]) for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == made
    assert answer["usage"]["prompt_tokens"] == 2  # each prompt once


async def test_prompt_logprobs_are_by_token_id(site, scored):
    ids = site.world.tokenizer.encode("abxcd")
    answer = await asked(site, prompt=ids, max_tokens=2, prompt_logprobs=2)
    found = answer["choices"][0]["prompt_logprobs"]
    assert found[0] is None
    close([entry[str(token)]["logprob"] for entry, token in zip(found[1:], ids[1:])],
          per_token(scored, ids)[1:])  # fmt: skip
    assert found[1][str(ids[1])]["decoded_token"] == "x"
    assert answer["choices"][0]["logprobs"] is None
    assert answer["choices"][0]["text"]
    both = await asked(site, prompt=ids, max_tokens=2, prompt_logprobs=0, logprobs=0)
    choice = both["choices"][0]
    assert len(choice["prompt_logprobs"]) == len(ids)
    assert len(choice["logprobs"]["token_logprobs"]) == both["usage"]["completion_tokens"]


async def test_logprobs_of_no_others_show_the_token_itself(site):
    answer = await asked(site, prompt="ab", max_tokens=3, logprobs=0)
    shown = answer["choices"][0]["logprobs"]
    for token, value, top in zip(shown["tokens"], shown["token_logprobs"], shown["top_logprobs"]):
        assert top == {token: value}


@pytest.mark.parametrize("most", [0, 4])
@pytest.mark.parametrize("logprobs", [None, 0, 1])
@pytest.mark.parametrize("n", [1, 2])
async def test_an_echo_streams_before_the_answer(site, n, logprobs, most):
    body = {"prompt": ["ab", "xcd"], "echo": True, "n": n, "max_tokens": most, "seed": 1}
    body["logprobs"] = logprobs
    whole = await asked(site, **body)
    lines = await site.lines(PATH, **body, temperature=0)
    texts = [""] * 2 * n
    shown: list[dict[str, list]] = [{} for _ in texts]
    for line in lines[:-1]:
        (choice,) = json.loads(line)["choices"]
        texts[choice["index"]] += choice["text"]
        for name, values in (choice["logprobs"] or {}).items():
            shown[choice["index"]].setdefault(name, []).extend(values)
    assert texts == [choice["text"] for choice in whole["choices"]]
    for found, choice in zip(shown, whole["choices"]):
        want = choice["logprobs"] or {}
        assert found.keys() == want.keys()
        if want:
            assert (found["tokens"], found["text_offset"]) == (want["tokens"], want["text_offset"])
            close(found["token_logprobs"], want["token_logprobs"])
            assert [top and top.keys() for top in found["top_logprobs"]] == [
                top and top.keys() for top in want["top_logprobs"]
            ]


async def test_what_benchmarks_send(site):
    site.engine.next_token = lambda tokens: 97
    for body in (
        {"best_of": 1, "ignore_eos": True, "max_tokens": 3, "top_p": 1.0, "stream": False},
        {"repetition_penalty": 1.0, "max_tokens": 3, "logprobs": None, "stop": None},
        {"max_tokens": 3, "stop": [], "seed": None, "suffix": None, "n": 1, "user": "u"},
    ):
        answer = await asked(site, prompt="ab", **body)
        assert answer["choices"][0]["text"] == "aaa"
    assert all(submit.sampling.max_new_tokens == 3 for submit in site.engine.submits)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"suffix": "x"}, "suffix"), ({"best_of": 2}, "best_of"), ({"max_tokens": 0}, "echo"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt": []}, "prompt"), ({"prompt": [[]]}, "empty"), ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [[1], 2]}, "prompt"), ({"prompt": [True]}, "prompt"), ({"n": 129}, "n"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"), ({"prompt": [-1]}, "-1"),
        ({"prompt": ["a"] * 3000}, "2048"), ({"prompt": ["a"] * 100, "n": 128}, "n"),
    ],
)  # fmt: skip
async def test_what_cannot_be_is_refused(site, body, named):
    reply = await site.post(PATH, **{"prompt": "a", "max_tokens": 1, **body})
    assert reply.status_code == 400, reply.text
    assert named in reply.json()["error"]["message"]
    assert site.engine.submits == []
