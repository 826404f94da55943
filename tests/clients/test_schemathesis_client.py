"""Requests that schemathesis makes from the server's own description: none may break it."""

from __future__ import annotations

import os
from random import Random

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode

pytestmark = pytest.mark.filterwarnings("ignore")  # its own

ERROR = {"message", "type", "param", "code"}
MATTER = ("prompt", "messages", "text", "input", "program", "tokens", "query", "items")


def thin_out(case: Case, random: Random) -> None:
    """Drop most of what is optional: of twenty fields drawn at random one is always wrong."""
    if isinstance(case.body, dict):
        optional = sorted(name for name in case.body if name not in MATTER)
        for name in random.sample(optional, max(0, len(optional) - random.randrange(4))):
            del case.body[name]
        if "model" in case.body:
            case.body["model"] = "stub"


@pytest.fixture(scope="module")
def url(stub):
    # Answers end after a few words, as there would be up to 8,192.
    with stub.launched("--words", "5", served_model_name="stub") as running:
        yield running.url


def attack(url: str, count: int) -> None:
    """Valid and invalid requests to all operations."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) > 20
    kinds = [
        operation.as_strategy(generation_mode=mode)
        for operation in operations
        for mode in (
            (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
            if operation.body
            else (GenerationMode.POSITIVE,)
        )
    ]
    seen: dict[int, int] = {}

    @settings(
        max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), database=None,
        derandomize=not os.environ.get("RAMET_FUZZ"),
    )  # fmt: skip
    @given(st.one_of(*kinds), st.randoms(use_true_random=False), st.integers(0, 3))
    def one(case: Case, random: Random, thin: int) -> None:
        if thin:
            thin_out(case, random)
        reply = case.call(timeout=30)
        status = reply.status_code
        seen[status] = seen.get(status, 0) + 1
        assert status < 500, (case.as_curl_command(), reply.text[:500])
        if status >= 400:
            error = reply.json()["error"]
            assert error.keys() == ERROR
            assert error["code"] == status
            assert len(reply.content) < 2000

    one()
    assert sum(seen.values()) >= count
    assert seen[200] > count / 20, seen
    assert seen[400] > count / 20
    requests = httpx.get(f"{url}/server_info").json()["requests"]
    assert requests == {"running": 0, "waiting": 0}
    done = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 3})
    assert done.json()["usage"]["completion_tokens"] == 3


def test_300_generated_requests(url):
    attack(url, 300)


@pytest.mark.slow
def test_2000_generated_requests(url):
    attack(url, 2000)
