"""In which order waiting requests are considered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from ..memory.kv_memory import KVMemory
from .request import Request
from .waiting import Program, Waiting, cached, program_of

MATCHED_AT_MOST = 256
"""A policy that looks at the tree does so for this many of the oldest requests."""

REMEMBERED = 65536
"""Programs whose beginning is remembered; of older ones it is forgotten."""


class SchedulePolicy(Protocol):
    """Orders the queue. It never drops a request; ageing is applied on top of it."""

    def order(self, waiting: Sequence[Request], memory: KVMemory) -> Sequence[Request]: ...


class FirstComeFirstServed:
    """By arrival."""

    def order(self, waiting: Sequence[Request], memory: KVMemory) -> Sequence[Request]:
        del memory
        return waiting


class LongestPrefixMatch:
    """The longest cached prefix first, so that what is cached is used before it is evicted."""

    def order(self, waiting: Sequence[Request], memory: KVMemory) -> Sequence[Request]:
        head, tail = waiting[:MATCHED_AT_MOST], waiting[MATCHED_AT_MOST:]
        return [*sorted(head, key=lambda r: -cached(r, memory)), *tail]


class DepthFirst:
    """In the order of the tree: neighbours by prefix run one after the other, which reaches the
    best hit rate of a batch when the cache holds the longest request (arXiv 2312.07104, theorem
    3.1)."""

    def order(self, waiting: Sequence[Request], memory: KVMemory) -> Sequence[Request]:
        del memory
        head, tail = waiting[:MATCHED_AT_MOST], waiting[MATCHED_AT_MOST:]
        return [*sorted(head, key=lambda r: (r.namespace, r.tokens.astype(">i4").tobytes())), *tail]


@dataclass(slots=True)
class _Program:
    """What is known of a program that has had a request in the queue."""

    began: float
    """When its first request came, which may have ended long ago."""
    latest: int = 0
    """Of its requests, the serial of the latest, ..."""
    remaining: int = 0
    """... and what was to come after that one."""


class ProgramOrder:
    """The program with the fewest requests left goes first, of those with as many the older one, so
    that programs finish. What is left is what waits and what was said to come: all of a program
    that was sent whole, the part that was sent of others. A request of no program is one of one."""

    def __init__(self) -> None:
        self._programs: dict[Program, _Program] = {}

    def order(self, waiting: Sequence[Request], memory: KVMemory) -> Sequence[Request]:
        del memory
        groups = waiting.by_program if isinstance(waiting, Waiting) else grouped(waiting)
        known = self._programs
        keys: list[tuple[int, float, float, int]] = []
        every = list(groups.items())
        for at, (key, group) in enumerate(every):
            first = group[0]
            program = known.get(key)
            if program is None:
                program = _Program(first.arrival)
                if first.program:
                    known[key] = program
            for request in group:
                if request.serial >= program.latest:
                    program.latest, program.remaining = request.serial, request.remaining
            keys.append((len(group) + program.remaining, program.began, first.arrival, at))
        keys.sort()
        while len(known) > REMEMBERED:
            del known[next(iter(known))]
        ordered: list[Request] = []
        for *_, at in keys:
            ordered += sorted(every[at][1], key=_arrival)
        return ordered


def grouped(requests: Iterable[Request]) -> dict[Program, list[Request]]:
    """Requests by their programs."""
    groups: dict[Program, list[Request]] = {}
    for request in requests:
        groups.setdefault(program_of(request), []).append(request)
    return groups


_arrival = attrgetter("arrival")


POLICIES: dict[str, type[SchedulePolicy]] = {
    "fcfs": FirstComeFirstServed,
    "lpm": LongestPrefixMatch,
    "dfs": DepthFirst,
    "program": ProgramOrder,
}


def overdue(waiting: Sequence[Request], now: float, bound: float) -> bool:
    """Whether somebody in the queue has waited longer than ``bound`` seconds."""
    # A retracted request may be younger than the queue it stands before.
    oldest = next((request for request in waiting if not request.retractions), None)
    heads = [*waiting[:1], *([oldest] if oldest else [])]
    return any(now - request.arrival > bound for request in heads)


def aged_first(
    ordered: Sequence[Request], waiting: Sequence[Request], now: float, bound: float
) -> Sequence[Request]:
    """Requests that have waited longer than ``bound`` seconds go before all others, in the order of
    the queue: retracted ones, then by arrival."""
    if not overdue(waiting, now, bound):
        return ordered
    aged = [request for request in waiting if now - request.arrival > bound]
    chosen = set(map(id, aged))
    return [*aged, *(request for request in ordered if id(request) not in chosen)]


def by_priority(ordered: Sequence[Request], now: float, ageing: float) -> Sequence[Request]:
    """Lower levels first, each in the order given. Every ``ageing`` seconds of waiting count as one
    level less, so that nobody waits for ever."""
    if len({request.level for request in ordered}) < 2:
        return ordered
    return sorted(ordered, key=lambda r: claim_of(r, now, ageing))


def claim_of(request: Request, now: float, ageing: float) -> int:
    """A request's level, less what it has waited."""
    return request.level - int((now - request.arrival) / ageing)
