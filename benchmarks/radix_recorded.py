"""A trace that a live engine recorded (``record_trace``): played again, or as a `Trace`."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from radix_trace import Trace
from ramet.runtime.engine.trace_file import Began, Seen, read_trace
from ramet.runtime.memory.kv_memory import KVMemory
from ramet.runtime.memory.radix_node import Node

PAGE = 16
WINDOW = 2048
"""Entries come in the order in which they ended. Of so many, the one goes first that was let in
first."""
MOST_PROGRAMS = 4096
"""Programs whose wishes are remembered; those of one that is silent for longer are taken back."""
_NONE = np.empty(0, np.int32)


@dataclass(slots=True)
class Counted:
    """What was found, of the requests that count. ``lost``: requests that are not in the file."""

    requests: int = 0
    prompt: int = 0
    found: int = 0
    """By the engine itself."""
    again: int = 0
    """When it was played again."""
    refused: int = 0
    lost: int = 0
    slots: int = 0
    eviction: str = ""


def admitted(path: str | Path) -> Iterator[Began | Seen]:
    """What was recorded, in the order in which it was let in, of few entries at a time."""
    window: list[tuple[float, int, Seen]] = []
    for number, seen in enumerate(read_trace(path)):
        if isinstance(seen, Began):
            yield from (heapq.heappop(window)[2] for _ in range(len(window)))
            yield seen
            continue
        heapq.heappush(window, (seen.entry.admitted, number, seen))
        if len(window) > WINDOW:
            yield heapq.heappop(window)[2]
    yield from (heapq.heappop(window)[2] for _ in range(len(window)))


def replay(path: str | Path, eviction: str = "", slots: int = 0) -> Counted:
    """Play it again in a cache of so many tokens (0: as the engine had). What is held is that cache
    and a window of entries, however long the file is."""
    counted = Counted()
    memory: KVMemory | None = None
    wishes: _Wishes | None = None
    for seen in admitted(path):
        if isinstance(seen, Began):
            counted.slots, counted.eviction = slots or seen.slots, eviction or seen.eviction
            memory = KVMemory(counted.slots // PAGE * PAGE, PAGE, eviction=counted.eviction)
            wishes = _Wishes(memory)
            continue
        if memory is None or wishes is None:
            raise ValueError(f"{path}: an entry before the beginning")
        entry, tokens = seen.entry, seen.hashes.astype(np.int32)
        counted.lost += entry.lost
        match = memory.hold(tokens[: entry.most], b"")
        after = int(match.slots[-1]) if match.length else -1
        fresh = memory.allocate(len(tokens) - match.length, match.length, after)
        if fresh is None:
            memory.release(match.node, _NONE)
            counted.refused += 1
            continue
        found = match.length
        every = np.concatenate((match.slots, fresh))
        shared = memory.share(match.node, tokens, every, match.length, b"")
        memory.release(shared.node, _NONE)
        wishes.ended(seen, shared.node)
        if entry.counted:
            counted.requests += 1
            counted.prompt += entry.prompt
            counted.found += entry.cached
            counted.again += found
    return counted


@dataclass(slots=True)
class _Wishes:
    """The ends of streams that programs keep, until one of their requests goes on from there. The
    marks that an engine sets beside these are not in a recording."""

    memory: KVMemory
    programs: OrderedDict[int, list[Node]] = field(default_factory=OrderedDict)

    def ended(self, seen: Seen, node: Node) -> None:
        entry = seen.entry
        if not entry.program or not self.memory.looks_ahead:
            return
        kept = self.programs.pop(entry.program, [])
        path = _path(node)
        for one in [one for one in kept if one.parent is None or id(one) in path]:
            kept.remove(one)
            self.memory.tree.unpin(one)
        if entry.keep:
            self.memory.tree.pin(node, ahead=entry.remaining)
            kept.append(node)
        elif not entry.remaining:
            self._forget(kept)
            return
        self.programs[entry.program] = kept
        if len(self.programs) > MOST_PROGRAMS:
            self._forget(self.programs.popitem(last=False)[1])

    def _forget(self, kept: list[Node]) -> None:
        for one in kept:
            self.memory.tree.unpin(one)


def _path(node: Node) -> set[int]:
    found: set[int] = set()
    at = node.parent
    while at is not None:
        found.add(id(at))
        at = at.parent
    return found


def beginning(path: str | Path, most: int) -> Trace:
    """The first ``most`` requests, as segments. Each waits for the one before it of its program
    that had ended when it came."""
    entries: list[Seen] = []
    for seen in admitted(path):
        if isinstance(seen, Began):
            if entries:
                break  # another recording, with other hashes
            continue
        entries.append(seen)
        if len(entries) == most:
            break
    if not entries:
        raise ValueError(f"{path} holds no requests")
    total = sum(len(seen.hashes) for seen in entries)
    memory = KVMemory(-(-total // PAGE) * PAGE + PAGE, PAGE)
    paths = [seen.hashes.astype(np.int32) for seen in entries]
    for tokens in paths:
        _put(memory, tokens)
    for seen, tokens in zip(entries, paths):
        memory.tree.at(tokens[: seen.entry.prompt])
    numbers: dict[int, int] = {}
    lengths: list[int] = []
    segments: list[int] = []
    starts = [0]
    for seen, tokens in zip(entries, paths):
        walk: list[Node] = []
        at: Node | None = memory.tree.at(tokens)
        while at is not None and at.parent is not None:
            walk.append(at)
            at = at.parent
        for node in reversed(walk):
            if id(node) not in numbers:
                numbers[id(node)] = len(lengths)
                lengths.append(len(node.tokens))
            segments.append(numbers[id(node)])
        if len(tokens) == seen.entry.prompt:  # nothing, or one token, was generated
            segments.append(len(lengths))
            lengths.append(1)
        starts.append(len(segments))
    after, think = _waited(entries)
    alone = Counter(seen.entry.program for seen in entries)[0]
    fresh = iter(range(-1, -alone - 1, -1))
    return Trace(
        np.array([seen.entry.program or next(fresh) for seen in entries], np.int64),
        np.array([seen.entry.arrived for seen in entries]),
        after,
        think,
        np.array(starts, np.int64),
        np.array(segments, np.int64),
        np.array(lengths, np.int64),
    )


def _put(memory: KVMemory, tokens: np.ndarray) -> None:
    match = memory.hold(tokens, b"")
    slots = memory.allocate(len(tokens) - match.length, match.length, -1)
    assert slots is not None
    every = np.concatenate((match.slots, slots))
    memory.release(memory.share(match.node, tokens, every, match.length, b"").node, _NONE)


def _waited(entries: list[Seen]) -> tuple[np.ndarray, np.ndarray]:
    after = np.full(len(entries), -1, np.int64)
    think = np.zeros(len(entries))
    earlier: dict[int, list[int]] = {}
    for i, seen in enumerate(entries):
        entry = seen.entry
        if not entry.program:
            continue
        before = earlier.setdefault(entry.program, [])
        ended = [j for j in before if entries[j].entry.ended <= entry.arrived]
        if ended:
            after[i] = max(ended, key=lambda j: entries[j].entry.ended)
            think[i] = entry.arrived - entries[after[i]].entry.ended
        before.append(i)
    return after, think
