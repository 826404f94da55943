"""Scores of labels after prompts."""

from __future__ import annotations

import asyncio
import math

import pytest
from ramet.runtime.gateway.http.state import HttpLimits

PATH = "/v1/score"
ASKED = {"query": "ab", "items": ["x", "cd"], "label_token_ids": [97, 260]}


@pytest.mark.parametrize("first", [False, True])
async def test_the_probability_of_each_label_after_each_item(site, scored, first):
    reply = await site.post(PATH, **ASKED, item_first=first)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    encode = site.world.tokenizer.encode
    texts = ["xab", "cdab"] if first else ["abx", "abcd"]
    want = [[math.exp(scored(encode(text), label)) for label in (97, 260)] for text in texts]
    assert answer["scores"] == [pytest.approx(row, rel=1e-3) for row in want]
    assert (answer["object"], answer["model"]) == ("scoring", "fake")
    tokens = sum(len(encode(text)) for text in texts)
    assert answer["usage"] == {
        "prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens,
    }  # fmt: skip
    assert site.engine.prompts == [encode(text) for text in texts], "once for all labels"
    assert all(submit.sampling.max_new_tokens == 0 for submit in site.engine.submits)
    await site.idle()


async def test_softmax_is_among_the_labels(site, scored):
    asked = {**ASKED, "label_token_ids": [97, 260, 97]}
    plain = (await site.post(PATH, **asked)).json()["scores"]
    soft = (await site.post(PATH, **asked, apply_softmax=True)).json()["scores"]
    for row, among in zip(plain, soft):
        assert row[0] == row[2]
        assert math.fsum(among) == pytest.approx(1)
        assert among == pytest.approx([value / math.fsum(row) for value in row], rel=1e-3)


async def test_each_item_may_have_labels_of_its_own(site):
    shared = (await site.post(PATH, **{**ASKED, "label_token_ids": [97, 98, 260]})).json()["scores"]
    own = {**ASKED, "label_token_ids": [[260, 97], [98]]}
    rows = (await site.post(PATH, **own)).json()["scores"]
    want = [[shared[0][2], shared[0][0]], [shared[1][1]]]
    assert rows == [pytest.approx(row, rel=1e-3) for row in want]


async def test_ids_are_taken_as_they_are(site):
    encode = site.world.tokenizer.encode
    ids = [encode("x"), encode("cd")]
    asked = {**ASKED, "query": encode("ab"), "items": ids}
    reply = await site.post(PATH, **asked)
    assert reply.status_code == 200, reply.text
    assert site.engine.prompts[0] == [*encode("ab"), *ids[0]]
    one = await site.post(PATH, query="ab", items="x", label_token_ids=[97])
    assert one.json()["scores"] == [[pytest.approx(reply.json()["scores"][0][0], rel=1e-3)]]


WRONG = (
    ({"query": None}, "query"), ({"items": []}, "items"), ({"items": [[1]]}, "items"),
    ({"query": [1], "items": ["a"]}, "items"), ({"items": None}, "items"),
    ({"label_token_ids": []}, "label_token_ids"), ({"label_token_ids": [10**9]}, "10000"),
    ({"label_token_ids": [-1]}, "-1"), ({"label_token_ids": "a"}, "label_token_ids"),
    ({"query": "", "items": [""]}, "empty"), ({"query": "a" * 600}, "512"),
    ({"label_token_ids": [[97], 98]}, "label_token_ids"), ({"label_token_ids": [[97]]}, "1 lists"),
    ({"label_token_ids": [[97], []]}, "empty"), ({"temperature": 0.5}, "temperature"),
    ({"score_extraction_token": "x"}, "score_extraction_token"),
    ({"text_1": "a", "text_2": "b"}, "embedding"), ({"label_token_ids": None}, "label_token_ids"),
)  # fmt: skip


@pytest.mark.parametrize(("body", "named"), WRONG)
async def test_what_is_wrong_is_named(site, body, named):
    reply = await site.post(PATH, **{**ASKED, **body})
    assert reply.status_code == 400, reply.text
    assert named in reply.json()["error"]["message"]
    assert site.engine.submits == []


async def test_it_is_bounded_and_can_be_given_up(new_site):
    site = await new_site(limits=HttpLimits(samples=3))
    reply = await site.post(PATH, **ASKED)
    assert (reply.status_code, "items times labels" in reply.text) == (400, True)
    site.engine.idle = True
    asked = {**ASKED, "items": ["x"]}
    waiting = asyncio.create_task(site.post(PATH, **asked))
    await site.world.settle(lambda: len(site.engine.running) == 1)
    (name,) = [run.rid for run in site.state.runs.values()]
    await site.post("/abort", rid=name)
    assert (await waiting).status_code == 499
    await site.idle()
