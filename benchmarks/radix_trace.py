"""Traces of requests that share prefixes, as columns: recorded elsewhere, or made here from a seed.

A request's tokens are a path of segments, the last of which it generates. Segments are whole: two
requests that share a token share all its segment. Requests stand in the order of their arrival.
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(slots=True)
class Trace:
    """N requests of P programs over S segments."""

    program: Ints
    """[N]"""
    arrival: Floats
    """[N] seconds; when it came, or (with ``after``) would have come."""
    after: Ints
    """[N] the request whose end it waits for, -1: none"""
    think: Floats
    """[N] seconds from that end to its arrival"""
    starts: Ints
    """[N + 1] request i's path is segments[starts[i] : starts[i + 1]]"""
    segments: Ints
    lengths: Ints
    """[S] tokens of each segment"""

    def __len__(self) -> int:
        return len(self.program)

    def path(self, i: int) -> Ints:
        return self.segments[self.starts[i] : self.starts[i + 1]]

    def followers(self) -> dict[int, list[int]]:
        """Who waits for whom; under -1, who waits for nobody."""
        found: dict[int, list[int]] = {}
        for i, before in enumerate(self.after.tolist()):
            found.setdefault(before, []).append(i)
        return found

    def reordered(self, order: Ints) -> Trace:
        """The same requests in another order of arrival. Who waits for whom is left out."""
        sizes = np.diff(self.starts)[order]
        starts = np.concatenate(([0], np.cumsum(sizes)))
        at = np.repeat(self.starts[order] - starts[:-1], sizes) + np.arange(starts[-1])
        return Trace(
            self.program[order],
            self.arrival[order],
            np.full(len(order), -1),
            np.zeros(len(order)),
            starts,
            self.segments[at],
            self.lengths,
        )

    def prompt_tokens(self) -> int:
        """Of all requests together, what they generate not counted."""
        ends = self.starts[1:] - 1
        return int(self.lengths[self.segments].sum() - self.lengths[self.segments[ends]].sum())

    def longest(self) -> int:
        """Tokens of the longest request."""
        ends = np.concatenate(([0], np.cumsum(self.lengths[self.segments])))
        return int(np.diff(ends[self.starts]).max())

    def working_set(self) -> int:
        """Tokens of the smallest cache that loses nothing: most that are between their first and
        their last use at one time."""
        count = np.diff(self.starts)
        at = np.repeat(np.arange(len(self)), count)
        first = np.full(len(self.lengths), len(self))
        last = np.full(len(self.lengths), -1)
        np.minimum.at(first, self.segments, at)
        np.maximum.at(last, self.segments, at)
        used = last >= 0
        change = np.zeros(len(self) + 1, np.int64)
        np.add.at(change, first[used], self.lengths[used])
        np.add.at(change, last[used] + 1, -self.lengths[used])
        return int(np.cumsum(change).max())

    def save(self, path: str | Path) -> None:
        """As an .npz with one array a column."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        np.savez_compressed(path, **columns)

    @staticmethod
    def load(path: str | Path) -> Trace:
        """Raises `ValueError` for a file that is no trace, `OSError` where there is none."""
        if not zipfile.is_zipfile(path):
            with Path(path).open("rb"):  # says what else may be wrong
                raise ValueError(f"{path} is no trace")
        try:
            with np.load(path, allow_pickle=False) as data:
                missing = [field.name for field in fields(Trace) if field.name not in data]
                if missing:
                    raise ValueError(f"no column {', '.join(missing)}")
                trace = Trace(**{field.name: data[field.name] for field in fields(Trace)})
        except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(f"{path}: {error}") from None
        if not len(trace.program):
            raise ValueError(f"{path} holds no requests")
        n, segments = len(trace.program), trace.segments
        columns = trace.arrival, trace.after, trace.think, trace.starts[1:]
        if any(len(column) != n for column in columns):
            raise ValueError(f"{path}: columns of different lengths")
        if trace.starts[0] != 0 or trace.starts[-1] != len(segments):
            raise ValueError(f"{path}: starts do not cut the segments into paths")
        if (np.diff(trace.starts) < 2).any():
            raise ValueError(f"{path}: a path needs a prompt and an output")
        if len(segments) and not 0 <= segments.min() <= segments.max() < len(trace.lengths):
            raise ValueError(f"{path}: a segment without a length")
        if (trace.lengths < 1).any() or (trace.after >= n).any():
            raise ValueError(f"{path}: an empty segment, or a request after none of these")
        return trace


class _Maker:
    """Collects programs, then sorts their requests by time."""

    def __init__(self, seed: int, concurrent: float) -> None:
        self.dice = np.random.default_rng(seed)
        self._concurrent = concurrent
        self._lengths: list[int] = []
        self._paths: list[list[int]] = []
        self._rows: list[tuple[float, int, int, float]] = []
        self._clock = 0.0
        self._programs = 0

    def __len__(self) -> int:
        return len(self._rows)

    def segment(self, low: int, high: int) -> int:
        """A new one of low to high tokens."""
        self._lengths.append(int(self.dice.integers(low, high + 1)))
        return len(self._lengths) - 1

    def begin(self) -> None:
        """A new program. So many are under way at a time, on average."""
        self._programs += 1
        self._begun = self._latest = self._clock

    def request(self, path: list[int], after: int = -1, think: float = 0.0) -> int:
        """A request ``think`` seconds after another's end; generating takes about a second."""
        since = self._begun if after < 0 else self._rows[after][0] + self.dice.exponential(1.0)
        time = since + think + self.dice.exponential(0.05)
        self._rows.append((time, self._programs, after, think))
        self._paths.append(path)
        self._latest = max(self._latest, time)
        return len(self._rows) - 1

    def end(self) -> None:
        lasted = self._latest - self._begun
        self._clock += self.dice.exponential((lasted + 1.0) / self._concurrent)

    def trace(self, count: int) -> Trace:
        times, programs, after, think = (np.array(column) for column in zip(*self._rows))
        order = np.argsort(times, kind="stable")
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        after = np.where(after < 0, -1, place[after])
        sizes = [len(path) for path in self._paths]
        trace = Trace(
            programs.astype(np.int64),
            times,
            after,
            think,
            np.concatenate(([0], np.cumsum(sizes))),
            np.concatenate([np.array(path, np.int64) for path in self._paths]),
            np.array(self._lengths, np.int64),
        )
        ordered = trace.reordered(order)
        ordered.after, ordered.think = after[order], think[order]
        return _first(ordered, count)


def _first(trace: Trace, count: int) -> Trace:
    count = min(count, len(trace))
    short = trace.reordered(np.arange(count))
    short.after, short.think = trace.after[:count], trace.think[:count]
    return short


def few_shot(count: int, seed: int = 0, concurrent: float = 64) -> Trace:
    """Questions behind the examples of one of 40 tasks, some asked often: three answers, then one
    more look at the question with all of them."""
    make = _Maker(seed, concurrent)
    stems = [make.segment(800, 3000) for _ in range(40)]
    weight = 1 / np.arange(1, 41)
    while len(make) < count + 8 * concurrent:
        make.begin()
        stem = stems[int(make.dice.choice(40, p=weight / weight.sum()))]
        question = make.segment(40, 160)
        for _ in range(3):
            last = make.request([stem, question, make.segment(30, 200)])
        make.request([stem, question, make.segment(200, 600), make.segment(10, 60)], last)
        make.end()
    return make.trace(count)


def tree_of_thought(count: int, seed: int = 0, concurrent: float = 64) -> Trace:
    """A question, three thoughts, two on each of these, a verdict on every one, an answer."""
    make = _Maker(seed, concurrent)
    system = make.segment(600, 600)
    while len(make) < count + 17 * concurrent:
        make.begin()
        root = [system, make.segment(150, 500)]
        for _ in range(3):
            thought = [*root, make.segment(80, 300)]
            one = make.request(thought)
            make.request([*thought, make.segment(20, 40), make.segment(5, 30)], one)
            for _ in range(2):
                further = [*thought, make.segment(20, 40), make.segment(80, 300)]
                two = make.request(further, one)
                make.request([*further, make.segment(20, 40), make.segment(5, 30)], two)
        make.request([*root, make.segment(200, 600), make.segment(50, 200)], two)
        make.end()
    return make.trace(count)


def agents(count: int, seed: int = 0, concurrent: float = 64) -> Trace:
    """One of six kinds of agent works on a task in 3 to 12 turns; a tool answers in between."""
    make = _Maker(seed, concurrent)
    kinds = [make.segment(500, 1500) for _ in range(6)]
    while len(make) < count + 12 * concurrent:
        make.begin()
        path = [kinds[int(make.dice.integers(0, 6))], make.segment(80, 300)]
        last = -1
        for _ in range(int(make.dice.integers(3, 13))):
            path = [*path, make.segment(40, 200)]
            last = make.request(path, last, float(make.dice.exponential(3.0)))
            path = [*path, make.segment(50, 600)]
        make.end()
    return make.trace(count)


GENERATORS = {"few-shot": few_shot, "tot": tree_of_thought, "agents": agents}
