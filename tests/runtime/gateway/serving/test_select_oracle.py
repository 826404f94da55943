"""`select` on the real model, against scores that transformers gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from ramet.runtime.launch import Launched, start
from ramet.runtime.program.events import Done, Event, Failed, Value
from ramet.runtime.program.instructions import Program, Select, Text
from ramet.runtime.protocol.codec import client_codec, gateway_codec
from ramet.runtime.protocol.messages import Hello, OpenProgram, ProgramEvents

pytestmark = pytest.mark.model

CASES = json.loads(
    (Path(__file__).parents[3] / "cases" / "smollm2_select.json").read_text(encoding="utf-8")
)["cases"]


@pytest.fixture(scope="module")
def runtime() -> Iterator[Launched]:
    launched = start({"dtype": "float32", "max_total_tokens": 8192})
    yield launched
    launched.stop()


@pytest.fixture(scope="module")
def socket(runtime: Launched) -> Iterator[Any]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(runtime.address)
        socket.send(client_codec.encode(Hello(version=1)))
        gateway_codec.decode(socket.recv())
        yield socket


def select(socket: Any, case: dict[str, Any], method: str, boundary: str) -> Value:
    choices = tuple((choice["choice"],) for choice in case["choices"])
    program = Program(
        instructions=(
            Text(parts=(case["prompt"],)),
            Select(op=1, name="x", choices=choices, method=method, boundary=boundary),
        )
    )
    data = msgspec.Raw(msgspec.msgpack.encode(program))
    socket.send(client_codec.encode(OpenProgram(pid=1, program=data, closed=True)))
    found: list[Event] = []
    while not any(isinstance(event, Done) for event in found):
        assert socket.poll(60_000)
        message = gateway_codec.decode(socket.recv())
        assert isinstance(message, ProgramEvents)
        found += msgspec.msgpack.decode(message.events, type=list[Event])
    assert not [event for event in found if isinstance(event, Failed)]
    (value,) = [event for event in found if isinstance(event, Value)]
    return value


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_plain_scores_and_winners(socket, case):
    mean = select(socket, case, "token_length_normalized", "plain")
    assert mean.value == case["best_by_mean"]
    for score, expected in zip(mean.meta.choices, case["choices"], strict=True):
        assert [entry[1] for entry in score.input_token_logprobs] == expected["token_ids"]
        values = [entry[0] for entry in score.input_token_logprobs]
        assert values == pytest.approx(expected["token_logprobs"], abs=1e-3)
        assert sum(values) == pytest.approx(expected["sum_logprob"], abs=1e-3)
        assert score.normalized_prompt_logprobs == pytest.approx(expected["mean_logprob"], abs=1e-3)
    greedy = select(socket, case, "greedy_token_selection", "plain")
    assert greedy.value == case["best_by_greedy_token"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_exact_agrees_where_the_boundary_changes_nothing(socket, case):
    if not all(choice["joint_tokenization_identical"] for choice in case["choices"]):
        pytest.skip("the boundary matters here")
    exact = select(socket, case, "token_length_normalized", "exact")
    assert exact.value == case["best_by_mean"]
    for score, expected in zip(exact.meta.choices, case["choices"], strict=True):
        assert score.normalized_prompt_logprobs == pytest.approx(expected["mean_logprob"], abs=1e-3)


def test_unconditional_scores(socket):
    several = [c for c in CASES if any(len(choice["token_ids"]) > 2 for choice in c["choices"])]
    assert several
    for case in several[:2]:
        value = select(socket, case, "unconditional_likelihood_normalized", "plain")
        for score, expected in zip(value.meta.choices, case["choices"], strict=True):
            alone = [entry[0] for entry in score.unconditional_token_logprobs]
            reference = expected["unconditional_token_logprobs"]
            assert alone[0] is None
            assert reference[0] is None
            assert alone[1:] == pytest.approx(reference[1:], abs=1e-3)
