"""One edge of the radix tree, and what is found in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .page_pool import SlotArray

TokenArray = npt.NDArray[np.int32]


class Node:
    """One edge and the point it leads to. Only the tree changes it."""

    __slots__ = (
        "ahead", "awaited", "chain", "children", "data", "due", "hits", "last_use", "lock",
        "parent", "pins", "queued", "returns", "review", "serial", "since", "slots", "tokens",
    )  # fmt: skip

    def __init__(self, parent: Node | None, tokens: TokenArray, slots: SlotArray, serial: int):
        self.parent = parent
        self.spell(tokens, slots)
        self.chain: tuple[int, bytes] | None = None
        """Tokens up to its end, and the name of their last whole block (of a root, its namespace),
        once somebody asked."""
        self.children: dict[int, Node] = {}
        self.lock = 0
        self.pins = 0
        self.awaited = 0
        self.due = 0
        self.ahead = 0
        self.hits = 0
        self.returns = 0
        self.last_use = 0
        self.since = 0
        self.queued: tuple[int, ...] | None = None
        self.review: int | None = None
        self.serial = serial

    def spell(self, tokens: TokenArray, slots: SlotArray) -> None:
        """Give it its tokens, of which it keeps a copy, and their slots."""
        self.data = np.asarray(tokens, np.int32).tobytes()
        self.tokens: TokenArray = np.frombuffer(self.data, np.int32)
        self.slots = slots

    def path(self) -> Iterator[Node]:
        """From here up, without the root."""
        at = self
        while at.parent is not None:
            yield at
            at = at.parent

    def path_slots(self) -> list[SlotArray]:
        """Slots of the path from the root to here."""
        parts = [node.slots for node in self.path()]
        parts.reverse()
        return parts

    def depth(self) -> int:
        """How many tokens lead here."""
        size, at = 0, self
        while at.parent is not None:
            size += len(at.slots)
            at = at.parent
        return size


@dataclass(slots=True)
class Match:
    """How far a prompt is cached: ``length`` tokens, their slots in order, the node they end at."""

    node: Node
    slots: SlotArray

    @property
    def length(self) -> int:
        return len(self.slots)


def common_prefix(a: TokenArray, b: TokenArray) -> int:
    """How many leading tokens two prompts share."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n
