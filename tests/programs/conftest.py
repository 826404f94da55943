"""Runtimes on the real model, in float32, and what their answers are held against."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ramet as rt

MODEL = "smollm2-135m-instruct"
NEAR_TIE = 1e-3
CLOSE = 1e-3
CASES = Path(__file__).parents[1] / "cases"


def load(name: str) -> list[dict[str, Any]]:
    return json.loads((CASES / f"{name}.json").read_text("utf-8"))["cases"]


GREEDY = load("smollm2_greedy")
SELECT = load("smollm2_select")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.model)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes ``case`` runs for each greedy case, ``select_case`` likewise."""
    for name, cases in (("case", GREEDY), ("select_case", SELECT)):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, cases, ids=lambda case: case["id"])


@pytest.fixture(scope="session")
def greedy_cases() -> list[dict[str, Any]]:
    return GREEDY


@pytest.fixture(scope="session")
def sixteen() -> list[dict[str, Any]]:
    """A batch of 16: the cases, the first ones twice."""
    return [GREEDY[index % len(GREEDY)] for index in range(16)]


def settled(runtime: Any, seconds: float = 20.0) -> dict[str, Any]:
    """``server_info`` once nothing runs and no slot is held; fails where that does not come."""
    deadline = time.monotonic() + seconds
    while True:
        info = runtime.server_info()
        pages = info["pages"]
        assert pages["free"] + pages["cached"] + pages["held"] == pages["total"]
        quiet = info["requests"] == {"running": 0, "waiting": 0} and info["programs"] == 0
        if quiet and pages["held"] == 0:
            return info
        assert time.monotonic() < deadline, f"still held or running: {info}"
        time.sleep(0.05)


@pytest.fixture(scope="session", name="settled")
def settled_fixture() -> Callable[..., dict[str, Any]]:
    return settled


@pytest.fixture(scope="session")
def shared_runtime() -> Iterator[Any]:
    with rt.Runtime(MODEL, dtype="float32", max_total_tokens=12288, random_seed=1) as runtime:
        yield runtime


@pytest.fixture
def runtime(shared_runtime: Any) -> Iterator[Any]:
    """The runtime that most tests share. Whatever a test does, it must leave nothing behind."""
    yield shared_runtime
    settled(shared_runtime)


@pytest.fixture
def cold(runtime: Any) -> Any:
    """The same with an empty cache."""
    runtime.flush_cache()
    return runtime


class Oracle:
    """Compares answers with the recorded ones of another engine."""

    def ids(self, case: dict[str, Any], ids: list[int], new: int | None = None) -> None:
        """The output's ids (its first ``new``): the same, but for what a near tie lets differ."""
        want = case["output_token_ids"][:new]
        if case["min_top1_top2_margin"] >= NEAR_TIE:
            assert ids == want, f"{case['id']}: {ids} instead of {want}"

    def output(self, case: dict[str, Any], meta: dict[str, Any], new: int | None = None) -> None:
        """Ids and log-probs of the output, and how it ended."""
        entries = meta["output_token_logprobs"]
        ids = [token for _, token, _ in entries]
        self.ids(case, ids, new)
        for (got, token, _), want, known in zip(
            entries, case["output_logprobs"], case["output_token_ids"]
        ):
            if token != known:
                break  # only after a near tie, or `ids` would have failed
            assert got == pytest.approx(want, abs=CLOSE), case["id"]
        assert meta["completion_tokens"] == len(ids)
        if new is None:
            assert meta["finish_reason"]["type"] == case["finish_reason"]

    def prompt(self, case: dict[str, Any], meta: dict[str, Any]) -> None:
        """Ids and log-probs of the whole prompt."""
        entries = meta["input_token_logprobs"]
        assert [token for _, token, _ in entries] == case["prompt_token_ids"]
        assert entries[0][0] is None
        got = [value for value, _, _ in entries[1:]]
        assert got == pytest.approx(case["prompt_logprobs"][1:], abs=CLOSE), case["id"]

    def text(self, case: dict[str, Any], text: str) -> None:
        if case["min_top1_top2_margin"] >= NEAR_TIE:
            assert text == case["output_text"]


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    return Oracle()
