"""What Prometheus is told of the tiers below the tree."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families
from ramet.runtime.gateway.http.metrics import Metrics


def info(scale: int) -> dict:
    names = ("hit_tokens", "miss_tokens", "loads", "loaded_bytes", "stored_bytes")
    names += ("evicted_blocks", "refused_blocks")
    host = {name: scale * at for at, name in enumerate(names, 1)}
    disk = {name: 10 * number for name, number in host.items()}
    return {
        "tiers": {
            "rates": {},
            "loading": 0,
            "host": {**host, "dropped_blocks": 0, "used_bytes": 7 * scale, "limit_bytes": 99},
            "disk": {**disk, "dropped_blocks": scale, "used_bytes": 70 * scale, "limit_bytes": 999},
        }
    }


def read(metrics: Metrics, said: dict) -> dict[tuple[str, str], float]:
    text = metrics.text(said).decode()
    return {
        (sample.name, sample.labels.get("tier", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("ramet:")
    }


def test_counters_go_on_where_the_engine_does():
    metrics = Metrics(vllm_names=False)
    found = read(metrics, {"tiers": {}})
    assert found["ramet:cache_tier_hit_tokens_total", "host"] == 0
    assert found["ramet:disk_cache_used_bytes", ""] == 0
    read(metrics, info(1))
    found = read(metrics, info(3))
    assert found["ramet:cache_tier_hit_tokens_total", "host"] == 3
    assert found["ramet:cache_tier_miss_tokens_total", "disk"] == 60
    assert found["ramet:cache_tier_loads_total", "host"] == 9
    assert found["ramet:cache_tier_loaded_bytes_total", "disk"] == 120
    assert found["ramet:cache_tier_stored_bytes_total", "host"] == 15
    assert found["ramet:cache_tier_dropped_blocks_total", "disk"] == 3
    assert found["ramet:cache_tier_evicted_blocks_total", "host"] == 18
    assert found["ramet:cache_tier_refused_blocks_total", "disk"] == 210
    assert found["ramet:host_cache_used_bytes", ""] == 21
    assert found["ramet:disk_cache_used_bytes", ""] == 210


def test_a_new_engine_begins_at_nothing_and_the_counters_do_not():
    metrics = Metrics(vllm_names=False)
    read(metrics, info(5))
    found = read(metrics, info(2))
    assert found["ramet:cache_tier_hit_tokens_total", "host"] == 7
    assert found["ramet:host_cache_used_bytes", ""] == 14


def test_without_tiers_nothing_is_missing():
    found = read(Metrics(vllm_names=False), {"retracted": 0})
    assert found["ramet:cache_tier_loads_total", "disk"] == 0
