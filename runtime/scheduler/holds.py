"""What running requests hold: a row each, a path of the tree, and slots that are theirs alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..memory.kv_memory import KVMemory
from ..memory.page_pool import SlotArray
from ..memory.radix_node import Match, Node
from .batch import IntArray, NewRow
from .kept_paths import keep_long_paths
from .request import Request
from .rows import Rows

_NO_TOKENS: IntArray = np.empty(0, np.int32)


class Holds:
    """The way of KV from a row into the tree, and of the tree's slots into a row. What the runner's
    tables must be told of that is collected for the next step, until `told`."""

    def __init__(self, rows: Rows, memory: KVMemory) -> None:
        self._rows = rows
        self._memory = memory
        self.new_rows: list[NewRow] = []
        self._going_on: dict[int, NewRow] = {}
        self.moves: list[tuple[int, IntArray]] = []
        """(row, slots): what a row computed was the tree's already, and lies there."""

    def told(self) -> None:
        """A step takes along what was collected."""
        self.new_rows, self.moves = [], []

    def take(self, request: Request, match: Match, slots: IntArray) -> None:
        """A request begins to run: it holds ``match``, whose slots come first in ``slots``; with
        those that follow there is one for each of its tokens up to the target."""
        request.node = match.node
        request.took_over = False  # one that was sent back begins with what is the tree's by now
        if request.cached_tokens < 0:
            request.cached_tokens = match.length
        output = request.output.copy()
        row = self._rows.enter(request, slots, match.length)
        prompt = request.tokens[: request.prompt_len]
        self.new_rows.append(NewRow(row, request.sampling, prompt, output, match.slots))

    def go_on(self, row: int, kept: int, then: Request) -> bool:
        """The request of a row has ended, and another takes the row over: behind the first ``kept``
        of its tokens come the other's own. False, and nothing changed, where there are no slots for
        them, or where what is to be computed is the tree's."""
        rows, ended = self._rows, self._request(row)
        computed, end = int(rows.computed[row]), kept + len(then.tokens)
        start = min(computed, kept, end - 1)
        if start < rows.shared[row]:
            return False
        # For forced output there are slots that nothing was computed into yet.
        have = int(rows.shared[row]) + len(rows.private(row))
        if end > have:
            slots = self._memory.allocate(end - have, have, int(rows.slots[row, have - 1]))
            if slots is None:
                return False
            rows.slots[row, have:end] = slots
        else:
            self._memory.give_back(rows.slots[row, end:have])
        then.tokens = np.concatenate((rows.tokens[row, :kept], then.tokens))
        then.prompt_len = end
        then.cached_tokens = start
        then.took_over = True
        then.node, ended.node = ended.node, None
        rows.take_over(row, then, start)
        self._going_on[row] = NewRow(
            row, then.sampling, then.tokens, _NO_TOKENS, _NO_TOKENS, goes_on=True
        )
        return True

    def begin(self, row: int) -> None:
        """A step holds the first of what a row computes: what went on in it begins."""
        new = self._going_on.pop(row, None)
        if new is not None:
            self.new_rows.append(new)

    def force(self, row: int, tokens: IntArray) -> bool:
        """Output that a row did not sample becomes known, with slots to compute it into. False, and
        nothing changed, if there are none."""
        rows = self._rows
        computed, target = int(rows.computed[row]), int(rows.known[row]) + len(tokens)
        last = int(rows.slots[row, computed - 1])
        slots = self._memory.allocate(target - computed, computed, last)
        if slots is None:
            return False
        rows.slots[row, computed:target] = slots
        rows.force(row, tokens)
        return True

    def share(self, row: int) -> None:
        """Let others use what this row has computed (or will have, when this step has run)."""
        rows = self._rows
        end = min(int(rows.computed[row]), self._request(row).line)
        if not self._memory.caching:
            return
        match = self._into_tree(row, end)
        slots = rows.slots[row, :end]
        rows.shared[row] = end
        if (match.slots != slots).any():
            rows.slots[row, :end] = match.slots
            self.moves.append((row, match.slots))

    def give_up(self, row: int, *, poisoned: bool = False) -> Node:
        """End a row's run: what it computed and knows goes into the tree, the rest is freed.
        ``poisoned``: its KV is not to be trusted, and goes where nobody else reads it."""
        rows, request = self._rows, self._request(row)
        assert request.node is not None
        end = min(int(rows.computed[row]), int(rows.known[row]))
        if request.trie is not None:
            end = min(end, request.line)
        private = rows.private(row)
        if self._memory.caching and end > rows.shared[row] and not poisoned:
            self._into_tree(row, end)
            private = private[end - int(rows.shared[row]) :]
        if request.trie is not None and not poisoned:
            private = keep_long_paths(self._memory, rows, row, private)
        self._memory.release(request.node, private)
        if poisoned:
            self._memory.tree.drop(request.node)
        self._forget_news(row)
        rows.leave(row)
        node, request.node = request.node, None
        return node

    def private(self) -> Iterator[SlotArray]:
        """Slots of each running request that are not the tree's."""
        rows = self._rows
        return (rows.private(row) for row, held in enumerate(rows.requests) if held is not None)

    def _forget_news(self, row: int) -> None:
        """What the runner was to be told of a row is true no longer."""
        self._going_on.pop(row, None)
        self.new_rows = [new for new in self.new_rows if new.row != row]
        self.moves = [move for move in self.moves if move[0] != row]

    def _into_tree(self, row: int, end: int) -> Match:
        """Put a row's tokens up to ``end`` into the tree, and hold that path from now on."""
        rows, request = self._rows, self._request(row)
        assert request.node is not None
        match = self._memory.share(
            request.node,
            rows.tokens[row, :end],
            rows.slots[row, :end],
            int(rows.shared[row]),
            request.namespace,
        )
        request.node = match.node
        return match

    def _request(self, row: int) -> Request:
        request = self._rows.requests[row]
        assert request is not None
        return request
