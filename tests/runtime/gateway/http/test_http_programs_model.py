"""Programs, responses and scores over the real model: the same as by the other paths."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
import ramet as rt
from ramet.runtime import launch
from ramet.runtime.program.events import Event, Value

pytestmark = pytest.mark.model

DOCUMENT = Path(__file__).parents[4] / "docs" / "http.md"


@pytest.fixture(scope="module")
def served() -> Iterator[Any]:
    running = launch.start(
        {
            "model_path": "smollm2-135m-instruct", "dtype": "float32", "max_total_tokens": 8192,
            "context_length": 2048, "port": 0, "zmq_port": 0,
        },
        listen=True,
    )  # fmt: skip
    yield running
    running.stop()


@pytest.fixture(scope="module")
def http(served: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def backend(served: Any) -> Iterator[Any]:
    made = rt.RuntimeEndpoint(next(a for a in served.addresses if a.startswith("tcp://")))
    yield made
    made.shutdown()


@rt.function
def tips(s, topic):
    s += rt.user(f"Give a tip about {topic}.")
    s += rt.assistant_begin()
    branches = s.fork(2)
    for seed, branch in enumerate(branches):
        branch += "Tip: " + rt.gen("tip", max_tokens=12, temperature=0.7, seed=seed)
    branches.join()
    s += "Best: " + rt.select("best", ["the first", "the second"])
    s += rt.gen("why", max_tokens=8, temperature=0)


def test_a_program_gives_what_it_gives_in_python(http, backend):
    state = tips.run("sleep", backend=backend)
    compiled = tips.compile()
    program = msgspec.to_builtins(compiled.program)
    reply = http.post("/v1/programs", json={"program": program, "args": {"topic": "sleep"}})
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    for name in ("tip", "best", "why"):
        assert answer["values"][name] == state[name]
    events = msgspec.convert(answer["events"], list[Event])
    scores = next(e.meta.choices for e in events if isinstance(e, Value) and e.name == "best")
    want = state.get_meta_info("best")["normalized_prompt_logprobs"]
    got = [score.normalized_prompt_logprobs for score in scores]
    assert got == pytest.approx(want, abs=1e-4)
    # The same in pieces, one instruction at a time.
    first = {"program": {**program, "instructions": []}, "args": {"topic": "sleep"}}
    name = http.post("/v1/programs", json={**first, "closed": False}).json()["id"]
    for instruction in program["instructions"]:
        body = {"instructions": [instruction]}
        assert http.post(f"/v1/programs/{name}/append", json=body).status_code == 200
    again = http.post(f"/v1/programs/{name}/append", json={"closed": True}).json()
    assert again["values"] == answer["values"]


def test_a_program_that_is_given_up_leaves_nothing(http):
    long = {"max_new_tokens": 500, "ignore_eos": True}
    gens = [{"type": "gen", "stream": n, "op": n, "sampling": long} for n in (1, 2, 3)]
    forked = [{"type": "text", "parts": ["Once"]}, {"type": "fork", "children": [1, 2, 3]}, *gens]
    body = {"program": {"instructions": forked}, "stream": True}
    with http.stream("POST", "/v1/programs", json=body) as reply:
        lines = reply.iter_lines()
        while '"op"' not in next(lines):
            pass
    name = http.post("/v1/programs", json={**body, "stream": False, "closed": False}).json()["id"]
    assert http.delete(f"/v1/programs/{name}").json()["deleted"]
    left = {**body, "stream": False, "closed": False, "lease": 0.3}
    name = http.post("/v1/programs", json=left).json()["id"]
    deadline = time.monotonic() + 10
    for running in (True, False):
        while bool(http.get("/server_info").json()["requests"]["running"]) != running:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert http.get(f"/v1/programs/{name}").status_code == 404
    assert http.get("/flush_cache").status_code == 200  # waits until nothing runs
    info = http.get("/server_info").json()
    assert (info["requests"], info["pages"]["held"]) == ({"running": 0, "waiting": 0}, 0)


def test_a_response_is_that_of_a_chat(served, http):
    asked = {"model": "smollm2-135m-instruct", "temperature": 0}
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=120) as client:
        first = client.responses.create(**asked, input="Name a colour.", max_output_tokens=16)
        second = client.responses.create(
            **asked, input="Another.", previous_response_id=first.id, max_output_tokens=16
        )
        messages = [
            {"role": "user", "content": "Name a colour."},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "Another."},
        ]
        chats = [
            client.chat.completions.create(**asked, messages=messages[:count], max_tokens=16)
            for count in (1, 3)
        ]
        texts = [chat.choices[0].message.content for chat in chats]
        assert texts == [first.output_text, second.output_text]
        stream = client.responses.create(
            **asked, input="Name a colour.", max_output_tokens=16, stream=True
        )
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(pieces) == first.output_text


def test_scores_are_the_models_probabilities(http):
    query, items = "The capital of France", [" is", " was"]
    labels = [http.post("/tokenize", json={"prompt": text}).json()["tokens"][0]
              for text in (" Paris", " the", " a")]  # fmt: skip
    body = {"query": query, "items": items, "label_token_ids": labels}
    rows = http.post("/v1/score", json=body).json()["scores"]
    for item, row in zip(items, rows):
        made = http.post(
            "/generate",
            json={
                "text": query + item, "return_logprob": True, "top_logprobs_num": 100,
                "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            },
        ).json()  # fmt: skip
        top = {token: value for value, token, _ in made["meta_info"]["output_top_logprobs"][0]}
        known = [label for label in labels if label in top]
        assert known
        for label in known:
            value = row[labels.index(label)]
            assert math.log(value) == pytest.approx(top[label], abs=1e-3)
        assert 0 < sum(row) < 1


def test_what_the_document_shows_works(http):
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    blocks = [text for language, text in fences if not language]
    shown = [
        (path, json.loads(body))
        for block in blocks
        for path, body in re.findall(r"^curl (?:-N )?http://127.0.0.1:8000(\S+) .*?-d '(.*?)'",
                                     block, re.MULTILINE | re.DOTALL)
    ]  # fmt: skip
    assert len(shown) == 5
    (path, whole), (_, opening), *appends, (score_path, score) = shown
    assert http.post(path, json=whole).json()["values"].keys() == {"tip", "best"}
    name = http.post(path, json={**opening, "stream": False}).json()["id"]
    answers = [http.post(f"{path}/{name}/append", json=body).json() for _, body in appends]
    assert answers[0]["status"] == "open"
    assert answers[1]["values"]["x"]
    rows = http.post(score_path, json=score).json()["scores"]
    assert rows == [pytest.approx([0.937, 0.063], abs=2e-3)]
