"""Numbers that Prometheus reads, cheap to add to: what is shown is made when it is asked for."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

SECONDS = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5,
    0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKENS = tuple(float(d * 10**e) for e in range(6) for d in (1, 2, 5))
_WAIT = 4096

Labels = Mapping[str, str]


class Counter:
    """Counts, by the values of its own labels where it has some; ``known`` are shown before they
    come up."""

    def __init__(
        self, name: str, text: str, label: str | None = None, known: Iterable[str] = ()
    ) -> None:
        self._name, self._text, self._label = name, text, label
        self._counts: Counts[str] = Counts(dict.fromkeys(known, 0))
        if label is None:
            self._counts[""] = 0

    def add(self, number: float = 1, value: str = "") -> None:
        self._counts[value] += number  # pyright: ignore[reportArgumentType]

    def total(self) -> float:
        return sum(self._counts.values())

    def families(self, labels: Labels) -> Iterator[Metric]:
        own = [] if self._label is None else [self._label]
        family = CounterMetricFamily(self._name, self._text, labels=[*labels, *own])
        for value, count in self._counts.items():
            family.add_metric([*labels.values(), *([value] if own else [])], count)
        yield family


class Gauge:
    """One number as it is now."""

    def __init__(self, name: str, text: str) -> None:
        self._name, self._text = name, text
        self.value = 0.0

    def families(self, labels: Labels) -> Iterator[Metric]:
        family = GaugeMetricFamily(self._name, self._text, labels=[*labels])
        family.add_metric([*labels.values()], self.value)
        yield family


class Histogram:
    """How many values fell under each bound. Values wait in a list until they are many, or somebody
    looks."""

    def __init__(self, name: str, text: str, bounds: Sequence[float] = SECONDS) -> None:
        self._name, self._text = name, text
        self._bounds = np.asarray(bounds, np.float64)
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._sum = 0.0
        self._fresh: list[float] = []

    def add(self, value: float) -> None:
        self._fresh.append(value)
        if len(self._fresh) >= _WAIT:
            self._enter()

    def extend(self, values: Sequence[float]) -> None:
        self._fresh.extend(values)
        if len(self._fresh) >= _WAIT:
            self._enter()

    def _enter(self) -> None:
        values = np.asarray(self._fresh, np.float64)
        self._fresh.clear()
        places = np.searchsorted(self._bounds, values)
        self._counts += np.bincount(places, minlength=len(self._counts))
        self._sum += float(values.sum())

    def families(self, labels: Labels) -> Iterator[Metric]:
        self._enter()
        yield histogram_family(
            self._name, self._text, labels, self._bounds.tolist(), self._counts.tolist(), self._sum
        )


def histogram_family(
    name: str,
    text: str,
    labels: Labels,
    bounds: Sequence[float],
    counts: Sequence[int],
    total: float,
) -> Metric:
    """A histogram of counts under each bound, and one count above all of them."""
    buckets: list[Any] = []
    below = 0
    for bound, count in zip((*bounds, float("inf")), counts):
        below += count
        buckets.append((floatToGoString(bound), below))
    family = HistogramMetricFamily(name, text, labels=[*labels])
    family.add_metric([*labels.values()], buckets, total)
    return family
