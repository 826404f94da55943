"""What Prometheus reads: requests as this gateway saw them, the engine's state as it says."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..request import EngineRequest

__all__ = ["CONTENT_TYPE_LATEST", "Metrics"]

_SECONDS = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5,
    0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKENS = tuple(float(d * 10**e) for e in range(6) for d in (1, 2, 5))
_LABELS = ("model_name", "engine")
_OURS, _THEIRS = "ramet:", "vllm:"


class Metrics:
    """All metrics of one server, under our names and those of vLLM that tools look for.

    A request counts when it ends. Its inter-token latency is the mean over its tokens.
    """

    def __init__(self, vllm_names: bool = True) -> None:
        self.model = ""
        self._registry = inner = CollectorRegistry()
        if vllm_names:
            self._registry = CollectorRegistry()
            self._registry.register(_Aliases(inner))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(_OURS + name, text, (*_LABELS, *labels), registry=inner)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(_OURS + name, text, _LABELS, registry=inner)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(_OURS + name, text, _LABELS, registry=inner, buckets=buckets)

        self._running = gauge("num_requests_running", "Requests in the running batch.")
        self._waiting = gauge("num_requests_waiting", "Requests that wait to be admitted.")
        self._usage = gauge("kv_cache_usage_perc", "Share of KV slots in use, from 0 to 1.")
        self._queries = counter("prefix_cache_queries", "Prompt tokens looked up in the tree.")
        self._hits = counter("prefix_cache_hits", "Prompt tokens found in the tree.")
        self._prompt = counter("prompt_tokens", "Prompt tokens, the cached ones included.")
        self._generated = counter("generation_tokens", "Tokens generated.")
        self._preempted = counter("num_preemptions", "Requests retracted when KV ran out.")
        self._ended = counter("request_success", "Requests that ended, by reason.",
                              "finished_reason")  # fmt: skip
        self._refused = counter("requests_rejected", "Requests refused as too many at a time.")
        self._ttft = histogram("time_to_first_token_seconds", "From submission to first token.")
        self._itl = histogram("inter_token_latency_seconds", "Mean time between tokens.")
        self._tpot = histogram("request_time_per_output_token_seconds", "The same, by request.")
        self._e2e = histogram("e2e_request_latency_seconds", "From submission to the end.")
        self._prompts = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._outputs = histogram(
            "request_generation_tokens", "Generated tokens of a request.", _TOKENS
        )
        self._retracted = 0

    def finished(self, request: EngineRequest, began: float) -> None:
        """A request ended now, in one way or another. ``began`` is on the monotonic clock."""
        finish, generated = request.finish, len(request.tokens)
        reason = "abort" if finish is None else finish.reason
        if request.error is not None:
            reason = "abort" if finish is not None and finish.reason == "abort" else "error"
        now = time.monotonic()
        prompt = len(request.prompt)
        self._of(self._prompt).inc(prompt)
        self._of(self._queries).inc(prompt)
        self._of(self._hits).inc(finish.cached_tokens if finish is not None else 0)
        self._of(self._generated).inc(generated)
        self._ended.labels(self.model, "0", reason).inc()
        self._of(self._prompts).observe(prompt)
        self._of(self._outputs).observe(generated)
        self._of(self._e2e).observe(now - began)
        first = request.first_token_at
        if first is not None:
            self._of(self._ttft).observe(first - began)
            if generated > 1:
                gap = (now - first) / (generated - 1)
                self._of(self._itl).observe(gap)
                self._of(self._tpot).observe(gap)

    def rejected(self) -> None:
        self._of(self._refused).inc()

    def text(self, info: Mapping[str, Any]) -> bytes:
        """Everything as text. ``info`` is what the engine says of itself."""
        requests, pages = info.get("requests") or {}, info.get("pages") or {}
        self._of(self._running).set(requests.get("running", 0))
        self._of(self._waiting).set(requests.get("waiting", 0))
        self._of(self._usage).set(pages.get("held", 0) / max(1, pages.get("total", 1)))
        retracted = int(info.get("retracted", 0))
        self._of(self._preempted).inc(max(0, retracted - self._retracted))
        self._retracted = retracted
        for metric in (self._queries, self._hits, self._prompt, self._generated, self._refused):
            self._of(metric)
        return generate_latest(self._registry)

    def _of(self, metric: Any) -> Any:
        return metric.labels(self.model, "0")


class _Aliases(Collector):
    """Every metric under its own name, and again under vLLM's."""

    def __init__(self, inner: CollectorRegistry) -> None:
        self._inner = inner

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        for metric in self._inner.collect():
            yield metric
            alias = Metric(metric.name.replace(_OURS, _THEIRS), metric.documentation, metric.type)
            for sample in metric.samples:
                alias.samples.append(sample._replace(name=sample.name.replace(_OURS, _THEIRS)))
            yield alias
