"""What Prometheus is told: that it adds up, and under which names."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from ramet.runtime.gateway.http.series import Histogram
from ramet.runtime.protocol.errors import ErrorInfo, QueueFullError
from ramet.runtime.protocol.messages import Finish, StepOut

COMPLETIONS = "/v1/completions"


class Scrape:
    """All samples of one text, by name and own labels."""

    def __init__(self, text: str) -> None:
        self.samples: dict[tuple[str, str], float] = {}
        self.names: set[str] = set()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = dict(sample.labels)
                assert labels.pop("engine") == "0"
                assert labels.pop("model_name") in ("fake", "tiny", "")
                key = sample.name, ",".join(f"{k}={v}" for k, v in labels.items())
                assert key not in self.samples, f"{key} twice"
                self.samples[key] = sample.value
                self.names.add(sample.name)

    def __call__(self, name: str, labels: str = "") -> float:
        return self.samples[f"ramet:{name}", labels]

    def sum(self, name: str) -> float:
        found = [v for (n, _), v in self.samples.items() if n == f"ramet:{name}"]
        assert found, name
        return sum(found)

    def check(self) -> None:
        """What must hold whenever nothing runs."""
        assert self("num_requests_running") == self("num_requests_waiting") == 0
        assert self.sum("request_success_total") == self("requests_received_total")
        assert self.sum("prompt_tokens_by_source_total") == self("prompt_tokens_total")
        made = self.sum("generation_tokens_by_source_total")
        assert made == self("generation_tokens_total")
        cached = self("prompt_tokens_by_source_total", "source=local_cache_hit")
        assert cached == self("prompt_tokens_cached_total")
        assert self("requests_aborted_total") == self(
            "request_success_total", "finished_reason=abort"
        )
        for name, labels in list(self.samples):
            if name.startswith("ramet:"):
                alias = name.replace("ramet:", "vllm:")
                assert self.samples[alias, labels] == self.samples[name, labels]
            if name.endswith("_bucket") and "le=+Inf" in labels:
                count = name.removesuffix("_bucket") + "_count"
                assert self.samples[name, labels] == self.samples[count, ""]


async def scrape(site: Any) -> Scrape:
    reply = await site.http.get("/metrics")
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/plain; version=")
    return Scrape(reply.text)


async def usages(site: Any) -> list[dict[str, int]]:
    """Of many kinds of requests at once."""
    whole = [
        {"prompt": "ab", "max_tokens": 5, "n": 2},
        {"prompt": ["ab", "cd", "e"], "max_tokens": 3},
        {"prompt": "a long one " * 8, "max_tokens": 7, "seed": 3},
        {"prompt": "score", "max_tokens": 0, "echo": True, "logprobs": 0},
        {"prompt": "stop", "max_tokens": 9, "stop": "b"},
    ]
    replies = await asyncio.gather(*(site.post(COMPLETIONS, **body) for body in whole * 3))
    assert all(reply.status_code == 200 for reply in replies)
    found = [reply.json()["usage"] for reply in replies]
    options = {"include_usage": True}
    for n in (1, 3):
        lines = await site.lines(
            COMPLETIONS, prompt="xy", max_tokens=6, n=n, stream_options=options
        )
        assert lines.pop() == "[DONE]"
        found.append(json.loads(lines[-1])["usage"])
    return found


async def test_usage_of_all_replies_is_what_the_counters_say(site):
    replies = await usages(site)
    await site.idle()
    found = await scrape(site)
    found.check()
    assert found("generation_tokens_total") == sum(u["completion_tokens"] for u in replies) > 100
    assert found("prompt_tokens_total") == sum(u["prompt_tokens"] for u in replies)
    assert found("prefix_cache_queries_total") > found("prompt_tokens_total"), "each sample looks"
    requests = found("requests_received_total")
    assert requests == 3 * (2 + 3 + 1 + 1 + 1) + 1 + 3
    for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time",
                 "request_decode_time", "request_inference_time"):  # fmt: skip
        assert found(f"{name}_seconds_count") == requests
    first = found("time_to_first_token_seconds_count")
    assert first == requests - 3, "what only scored has no first token"
    gaps = found("inter_token_latency_seconds_count")
    assert gaps == found("generation_tokens_total") - first, "one between any two tokens"
    assert found("request_generation_tokens_sum") == found("generation_tokens_total")
    assert 0 < found("time_to_first_token_seconds_sum") < found("e2e_request_latency_seconds_sum")


async def test_time_between_tokens_is_that_of_each_token(site):
    """A pause in the middle is one large gap, not a slightly larger mean."""
    site.engine.next_token = lambda tokens: 97
    running = asyncio.create_task(site.post(COMPLETIONS, prompt="a", max_tokens=60))
    await site.world.settle(
        lambda: any(len(r["tokens"]) > 20 for r in site.engine.running.values())
    )
    site.engine.idle = True
    await asyncio.sleep(0.3)
    site.engine.idle = False
    await running
    found = await scrape(site)
    name = "inter_token_latency_seconds"
    assert found(f"{name}_count") == 59
    assert found(f"{name}_bucket", "le=+Inf") - found(f"{name}_bucket", "le=0.25") == 1
    assert found(f"{name}_bucket", "le=0.15") >= 55
    assert 0.3 < found(f"{name}_sum") < found("e2e_request_latency_seconds_sum")


async def test_times_in_the_engine_are_as_it_says(site):
    """Queue, prefill and decode come from where they pass."""
    site.engine.idle = True
    running = asyncio.create_task(site.post(COMPLETIONS, prompt="xyz", max_tokens=4))
    await site.world.settle(lambda: bool(site.engine.running))
    rid = next(iter(site.engine.running))
    site.engine.running.clear()
    finish = Finish(
        rid=rid, reason="stop", matched=257, prompt_tokens=3, cached_tokens=2, queue_s=3.0,
        prefill_s=0.5, decode_s=7.0,
    )  # fmt: skip
    site.engine.send(StepOut(rids=b"", tokens=b"", finished=[finish]))
    await running
    found = await scrape(site)
    assert found("request_queue_time_seconds_sum") == 3.0
    assert found("request_prefill_time_seconds_sum") == 0.5
    assert found("request_decode_time_seconds_sum") == 7.0
    assert found("request_inference_time_seconds_sum") == 7.5
    assert found("prefix_cache_hits_total") == found("prompt_tokens_cached_total") == 2
    assert found("prompt_tokens_by_source_total", "source=local_compute") == 1


async def test_aborted_rejected_and_failed_are_told_apart(new_site):
    site = await new_site()
    site.engine.idle = True
    bodies = [{"prompt": "a", "max_tokens": 4}] * 4
    tasks = [asyncio.create_task(site.post(COMPLETIONS, **body)) for body in bodies]
    await site.world.settle(lambda: len(site.engine.running) == 4)
    first, second, *_ = site.engine.running
    for rid, error in ((first, QueueFullError("full")), (second, ValueError("broken"))):
        site.engine.running.pop(rid)
        finish = Finish(rid=rid, reason="abort", error=ErrorInfo.of(error))
        site.engine.send(StepOut(rids=b"", tokens=b"", finished=[finish]))
    await site.world.settle(lambda: sum(task.done() for task in tasks) == 2)
    await site.post("/abort", abort_all=True)
    statuses = sorted(reply.status_code for reply in await asyncio.gather(*tasks))
    assert statuses == [429, 499, 499, 500]
    found = await scrape(site)
    found.check()
    for reason, count in (("rejected", 1), ("error", 1), ("abort", 2), ("stop", 0)):
        assert found("request_success_total", f"finished_reason={reason}") == count
    assert found("requests_rejected_total", "reason=queue") == 1
    assert found("requests_rejected_total", "reason=connections") == 0, "it is counted once"
    assert found("prompt_tokens_total") == found("generation_tokens_total") == 0


async def test_clients_that_go_away_are_counted_as_aborted(site):
    site.engine.next_token = lambda tokens: 97
    site.engine.idle = True
    lost = [
        asyncio.create_task(site.post(COMPLETIONS, prompt="cd", max_tokens=500)) for _ in range(5)
    ]
    await site.world.settle(lambda: len(site.engine.running) == 5)
    for task in lost:
        task.cancel()
    await site.idle()
    found = await scrape(site)
    found.check()
    assert found("request_success_total", "finished_reason=abort") == 5


async def test_names_of_other_tools_can_be_left_out(new_site):
    site = await new_site(vllm_names=False)
    await site.post(COMPLETIONS, prompt="a", max_tokens=2)
    names = (await scrape(site)).names
    assert "ramet:generation_tokens_total" in names
    assert not any(name.startswith("vllm:") for name in names)


READ_BY_TOOLS = (
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
    "prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_total",
    "generation_tokens_total", "num_preemptions_total", "request_success_total",
    "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_sum",
    "request_time_per_output_token_seconds_count", "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_sum", "request_prefill_time_seconds_sum",
    "request_decode_time_seconds_sum", "request_inference_time_seconds_sum",
    "request_prompt_tokens_bucket", "request_generation_tokens_bucket",
    "request_params_max_tokens_bucket", "prompt_tokens_by_source_total",
)  # fmt: skip


async def test_all_names_are_there_from_the_start(new_site):
    """Also while the model loads: a dashboard that finds no series shows nothing."""
    site = await new_site(loading=True)
    reply = await site.http.get("/metrics")
    found = Scrape(reply.text)
    for name in READ_BY_TOOLS:
        assert {f"ramet:{name}", f"vllm:{name}"} <= found.names
    assert found("engine_up") == 0


async def test_a_dead_engine_is_seen_and_runs_nothing(site):
    assert (await scrape(site))("engine_up") == 1
    site.engine.die()
    await site.world.settle(lambda: site.state.health() is not None)
    found = await scrape(site)
    found.check()
    assert found("engine_up") == 0


def test_the_real_engine_s_numbers(launched):
    """Cached tokens, step sizes and times, from the engine to the text."""
    running = launched(max_running_requests=1)
    with httpx.Client(base_url=running.url, timeout=30) as client:
        found = Scrape(client.get("/metrics").text)
        assert found("num_requests_running") == 0
        usages: list[Any] = []
        for _ in range(3):
            body = {"prompt": "a prompt of some length " * 10, "max_tokens": 8, "n": 2,
                    "ignore_eos": True}  # fmt: skip
            usages.append(client.post(COMPLETIONS, json=body).json()["usage"])
        found = Scrape(client.get("/metrics").text)
        found.check()
        body = {"prompt": "a", "max_tokens": 8, "structured_outputs": {"regex": "[ab]{4}"}}
        assert len(client.post(COMPLETIONS, json=body).json()["choices"][0]["text"]) == 4
        constrained = Scrape(client.get("/metrics").text)
        body["structured_outputs"] = {"regex": "[ab]cdefg"}
        assert client.post(COMPLETIONS, json=body).json()["choices"][0]["text"].endswith("cdefg")
        forced = Scrape(client.get("/metrics").text)
        forced.check()
    assert forced("generation_tokens_by_source_total", "source=forced") == 5
    assert found("generation_tokens_by_source_total", "source=forced") == 0
    assert found("request_grammar_time_seconds_count") == 0
    assert constrained("request_grammar_time_seconds_count") == 1
    assert constrained("request_grammar_time_seconds_sum") > 0.01, "a process was started for it"
    assert constrained("grammar_mask_seconds_total") > found("grammar_mask_seconds_total") == 0
    queued = constrained("request_queue_time_seconds_sum") - found("request_queue_time_seconds_sum")
    assert queued < constrained("request_grammar_time_seconds_sum"), "it counts as no queue"
    assert found("generation_tokens_total") == 3 * 2 * 8
    assert found("prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert found("prompt_tokens_cached_total") == cached > 400
    assert found("iteration_tokens_total_sum") > 48
    assert found("iteration_tokens_total_count") > 20
    times = [found(f"request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode")]
    assert all(time > 0 for time in times)
    assert sum(times) < found("e2e_request_latency_seconds_sum")
    assert found("kv_cache_usage_perc") == 0


# --- histograms -----------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 20) | st.sampled_from([1.0, 2.0, 5.0]), max_size=60), st.booleans())
def test_a_value_falls_under_every_bound_that_is_not_below_it(values, at_once):
    histogram = Histogram("h", "text", (1.0, 2.0, 5.0))
    if at_once:
        histogram.extend(values)
    else:
        for value in values:
            histogram.add(value)
    (family,) = histogram.families({"a": "b"})
    for sample in family.samples:
        assert sample.labels["a"] == "b"
        if sample.name == "h_bucket":
            bound = float(sample.labels["le"])
            assert sample.value == sum(value <= bound for value in values)
        elif sample.name == "h_count":
            assert sample.value == len(values)
        else:
            assert sample.value == pytest.approx(sum(values))


def test_many_values_do_not_wait_for_ever():
    histogram = Histogram("h", "text")
    for _ in range(10_000):
        histogram.add(0.5)
    assert len(histogram._fresh) < 5_000


async def test_help_and_type_are_there_for_each(site):
    text = (await site.http.get("/metrics")).text
    for name in re.findall(r"^# TYPE (\S+)", text, re.MULTILINE):
        assert re.search(rf"^# HELP {name} \S", text, re.MULTILINE)
    assert "# TYPE ramet:generation_tokens_total counter" in text
    assert "# TYPE vllm:time_to_first_token_seconds histogram" in text
