"""What Prometheus reads: requests as this gateway saw them, the engine's state as it says."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ...protocol.errors import AbortedError, QueueFullError
from ..observer import Observer
from ..request import EngineRequest
from .series import TOKENS, Counter, Gauge, Histogram, histogram_family

__all__ = ["CONTENT_TYPE_LATEST", "Metrics"]

_OURS, _THEIRS = "ramet:", "vllm:"
_TIERS = ("host", "disk")
_REASONS = ("stop", "length", "abort", "error", "rejected")


class Metrics(Observer):
    """All metrics of one server, under our names, and with ``vllm_names`` also under those of vLLM
    that tools look for.

    A request counts when it ends. When nothing runs, requests received are those that ended, by
    reason, and tokens are those of all replies' usage.
    """

    def __init__(self, vllm_names: bool = True) -> None:
        self.model = ""
        self._registry = CollectorRegistry()
        self._registry.register(_Shown(self, vllm_names))
        self._info: Mapping[str, Any] = {}

        self._running = Gauge("num_requests_running", "Requests in the running batch.")
        self._waiting = Gauge("num_requests_waiting", "Requests that wait to be admitted.")
        self._usage = Gauge("kv_cache_usage_perc", "Share of KV slots in use, from 0 to 1.")
        self._up = Gauge("engine_up", "Whether the engine answers.")
        self._queries = Counter("prefix_cache_queries", "Prompt tokens looked up in the tree.")
        self._hits = Counter("prefix_cache_hits", "Prompt tokens found in the tree.")
        self._prompt = Counter("prompt_tokens", "Prompt tokens, the cached ones included.")
        self._sources = Counter(
            "prompt_tokens_by_source", "Prompt tokens, by where their KV came from.",
            "source", ("local_compute", "local_cache_hit"),
        )  # fmt: skip
        self._cached = Counter("prompt_tokens_cached", "Prompt tokens whose KV was cached.")
        self._generated = Counter("generation_tokens", "Tokens generated.")
        self._made = Counter(
            "generation_tokens_by_source", "Tokens generated, by how they were chosen.",
            "source", ("sampled", "forced"),
        )  # fmt: skip
        self._preempted = Counter("num_preemptions", "Requests retracted when KV ran out.")
        self._received = Counter("requests_received", "Requests sent to the engine.")
        self._ended = Counter(
            "request_success", "Requests that ended, by reason.", "finished_reason", _REASONS
        )
        self._aborted = Counter("requests_aborted", "Requests that were aborted.")
        self._refused = Counter(
            "requests_rejected", "Requests refused because there were too many.",
            "reason", ("queue", "connections"),
        )  # fmt: skip
        self._masks = Counter("grammar_mask_seconds", "Spent on masks of constrained rows.")
        tiers = "tier", _TIERS
        self._tiers = {
            "hit_tokens": Counter(
                "cache_tier_hit_tokens", "Prompt tokens found below the tree, by tier.", *tiers
            ),
            "miss_tokens": Counter(
                "cache_tier_miss_tokens", "Prompt tokens looked for there in vain.", *tiers
            ),
            "loads": Counter("cache_tier_loads", "Loads out of a tier.", *tiers),
            "loaded_bytes": Counter("cache_tier_loaded_bytes", "KV loaded out of a tier.", *tiers),
            "stored_bytes": Counter("cache_tier_stored_bytes", "KV stored in a tier.", *tiers),
            "dropped_blocks": Counter(
                "cache_tier_dropped_blocks", "Blocks that a tier had no room for.", *tiers
            ),
            "evicted_blocks": Counter(
                "cache_tier_evicted_blocks", "Blocks that made way for others.", *tiers
            ),
            "refused_blocks": Counter(
                "cache_tier_refused_blocks", "Files that were damaged or not ours.", *tiers
            ),
        }
        self._tier_bytes = {
            tier: Gauge(f"{tier}_cache_used_bytes", f"KV that the {tier} tier holds.")
            for tier in _TIERS
        }
        self._restarts = Counter("engine_restarts", "Times that the engine came back.")
        self._ttft = Histogram("time_to_first_token_seconds", "From arrival to first token.")
        self._itl = Histogram("inter_token_latency_seconds", "Between tokens of a request.")
        self._tpot = Histogram(
            "request_time_per_output_token_seconds", "Mean time between tokens, by request."
        )
        self._e2e = Histogram("e2e_request_latency_seconds", "From arrival to the end.")
        self._grammar = Histogram(
            "request_grammar_time_seconds", "From arrival until its grammar was there."
        )
        self._queue = Histogram("request_queue_time_seconds", "From arrival to admission.")
        self._prefill = Histogram("request_prefill_time_seconds", "Admission to first token.")
        self._decode = Histogram("request_decode_time_seconds", "From first token to the end.")
        self._inference = Histogram("request_inference_time_seconds", "Admission to the end.")
        self._prompts = Histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self._outputs = Histogram(
            "request_generation_tokens", "Generated tokens of a request.", TOKENS
        )
        self._wanted = Histogram("request_params_max_tokens", "Tokens asked for.", TOKENS)

    # --- as requests come and go ---

    def began(self) -> None:
        self._received.add()

    def gaps(self, seconds: Sequence[float]) -> None:
        self._itl.extend(seconds)

    def ended(self, request: EngineRequest, began: float, counts_prompt: bool) -> None:
        finish, error = request.finish, request.error
        reason = "abort" if finish is None and error is None else "error"
        if isinstance(error, QueueFullError):
            reason = "rejected"
            self._refused.add(1, "queue")
        elif isinstance(error, AbortedError):
            reason = "abort"
        elif finish is not None and error is None:
            reason = finish.reason
        if reason == "abort":
            self._aborted.add()
        self._ended.add(1, reason)
        first = request.first_token_at
        if first is None and (finish is None or error is not None):
            return  # nothing of it was computed, as far as anybody was told
        now = time.monotonic()
        prompt, cached = len(request.prompt), 0 if finish is None else finish.cached_tokens
        self._queries.add(prompt)
        self._hits.add(cached)
        if counts_prompt:
            self._prompt.add(prompt)
            self._cached.add(cached)
            self._sources.add(cached, "local_cache_hit")
            self._sources.add(prompt - cached, "local_compute")
        generated = len(request.tokens)
        self._generated.add(generated)
        forced = 0 if finish is None else min(finish.forced_tokens, generated)
        self._made.add(generated - forced, "sampled")
        self._made.add(forced, "forced")
        self._prompts.add(prompt)
        self._outputs.add(generated)
        self._wanted.add(request.sampling.max_new_tokens)
        self._e2e.add(now - began)
        if first is not None:
            self._ttft.add(first - began)
            if generated > 1:
                self._tpot.add((request.last_token_at - first) / (generated - 1))
        if finish is not None:
            if request.sampling.constraint is not None:
                self._grammar.add(finish.grammar_s)
            self._queue.add(finish.queue_s)
            self._prefill.add(finish.prefill_s)
            self._decode.add(finish.decode_s)
            self._inference.add(finish.prefill_s + finish.decode_s)

    def rejected(self) -> None:
        """A request was refused before it reached the engine's queue."""
        self._refused.add(1, "connections")

    def restarted(self) -> None:
        """The engine was gone and is back."""
        self._restarts.add()

    # --- as text ---

    def text(self, info: Mapping[str, Any], up: bool = True) -> bytes:
        """Everything as text. ``info`` is what the engine says of itself; empty: nothing now."""
        if info:
            pages = info.get("pages") or {}
            self._usage.value = pages.get("held", 0) / max(1, pages.get("total", 1))
            self._preempted.add(self._more("retracted", info))
            self._masks.add(self._more("mask_seconds", info))
            self._note_tiers(info.get("tiers") or {})
            self._info = info
        requests = (info.get("requests") or {}) if up else {}
        self._running.value = requests.get("running", 0)
        self._waiting.value = requests.get("waiting", 0)
        self._up.value = float(up)
        return generate_latest(self._registry)

    def _more(self, name: str, info: Mapping[str, Any]) -> float:
        """What an engine's counter grew by since the last look. A smaller one is a new engine's."""
        return _grown(name, info, self._info)

    def _note_tiers(self, tiers: Mapping[str, Any]) -> None:
        before = self._info.get("tiers") or {}
        for tier in _TIERS:
            now = tiers.get(tier) or {}
            self._tier_bytes[tier].value = now.get("used_bytes", 0)
            for name, counter in self._tiers.items():
                counter.add(_grown(name, now, before.get(tier) or {}), tier)

    def families(self) -> Iterator[Metric]:
        """All that there is, under names without a prefix."""
        labels = {"model_name": self.model, "engine": "0"}
        every = [*vars(self).values(), *self._tiers.values(), *self._tier_bytes.values()]
        for series in every:
            if isinstance(series, (Counter, Gauge, Histogram)):
                yield from series.families(labels)
        steps = self._info.get("step_tokens")
        if steps:
            yield histogram_family(
                "iteration_tokens_total", "Tokens computed in a step.", labels,
                steps["bounds"], steps["counts"], steps["sum"],
            )  # fmt: skip


def _grown(name: str, info: Mapping[str, Any], before: Mapping[str, Any]) -> float:
    now, old = info.get(name, 0), before.get(name, 0)
    return now - old if now >= old else now


class _Shown(Collector):
    """Every metric under each prefix that it goes by."""

    def __init__(self, metrics: Metrics, vllm_names: bool) -> None:
        self._metrics = metrics
        self._prefixes = (_OURS, _THEIRS) if vllm_names else (_OURS,)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        for family in self._metrics.families():
            for prefix in self._prefixes:
                shown = Metric(prefix + family.name, family.documentation, family.type)
                shown.samples = [s._replace(name=prefix + s.name) for s in family.samples]
                yield shown
