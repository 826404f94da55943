"""Slots of KV: which are free, and how to hand them out in runs that kernels like.

A slot is room for one token's K and V in every layer. Slots are grouped in pages of ``page_size``
neighbours. Sharing is by slot; pages are only the grain in which slots are handed out, so that a
tile of tokens whose positions share a page lies in one contiguous, aligned run wherever that is
possible:

    position   0 ………………… 15 16 ……………… 31 32 33
    slot      160 ……………… 175 64 ………………… 79 80 81      (two whole pages and the head of a third)

The first page is scratch: padding rows of captured steps write there, and nobody is given it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

SlotArray = npt.NDArray[np.int32]

FREE, PRIVATE, TREE = 0, 1, 2
_NONE: SlotArray = np.empty(0, np.int32)


class PagePool:
    """Knows of each slot whether it is free, private to a request, or the tree's.

    The owner of a slot gives it back by `free` (exactly once); handing it to the tree is `to_tree`.
    """

    def __init__(self, num_slots: int, page_size: int = 16) -> None:
        """``num_slots`` usable slots, rounded down to whole pages; ids run from ``page_size``
        up."""
        if page_size < 1:
            raise ValueError(f"page_size must be >= 1, not {page_size}")
        pages = num_slots // page_size
        if pages < 1:
            raise ValueError(f"{num_slots} slots do not fill one page of {page_size}")
        self.page_size = page_size
        self.total = pages * page_size
        self.owner = np.zeros((pages + 1) * page_size, np.uint8)
        # Lists: a step looks at hundreds of pages one by one.
        self._free_in_page = [0] + [page_size] * pages
        self._whole = list(range(pages, 0, -1))
        self._broken: dict[int, None] = {}
        self._num_free = self.total

    @property
    def num_free(self) -> int:
        """Slots that nobody owns."""
        return self._num_free

    def allocate(self, count: int, position: int = 0, after: int = -1) -> SlotArray | None:
        """``count`` private slots for consecutive tokens from ``position`` on, or ``None`` if fewer
        are free. ``after`` is the slot of the token before: its page is filled up first."""
        if count > self._num_free:
            return None
        if count == 0:
            return _NONE
        parts: list[SlotArray] = []
        left = count
        size = self.page_size
        if after >= 0:
            end = (after // size + 1) * size
            run = self.owner[after + 1 : min(end, after + 1 + left)]
            taken = len(run) if not run.any() else int(np.argmax(run != FREE))
            if taken:
                parts.append(self._take(np.arange(after + 1, after + 1 + taken, dtype=np.int32)))
                left -= taken
                position += taken
        while left and self._whole:
            page = self._whole.pop()
            start = position % size
            taken = min(size - start, left)
            first = page * size + start
            if taken == size and left >= 2 * size:
                # A long prompt: take many whole pages in one go.
                more = min(left // size - 1, len(self._whole))
                keep = len(self._whole) - more
                pages = np.array([page, *reversed(self._whole[keep:])], np.int32)
                del self._whole[keep:]
                slots = (pages[:, None] * size + np.arange(size, dtype=np.int32)).reshape(-1)
                taken = len(slots)
                self.owner[slots] = PRIVATE
                for page in pages.tolist():
                    self._free_in_page[page] = 0
                self._num_free -= taken
                parts.append(slots)
            else:
                parts.append(self._take(np.arange(first, first + taken, dtype=np.int32)))
            left -= taken
            position += taken
        while left:
            page = next(iter(self._broken))
            first = page * size
            slots = (self.owner[first : first + size] == FREE).nonzero()[0][:left] + first
            parts.append(self._take(slots.astype(np.int32)))
            left -= len(slots)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def allocate_next(self, last: SlotArray, positions: npt.NDArray[np.int32]) -> SlotArray | None:
        """One private slot for each of many growing requests: the one after ``last`` where it is
        free, a fresh page's otherwise. ``None`` (and nothing taken) if fewer are free than
        asked."""
        if len(last) > self._num_free:
            return None
        slots = last + 1
        fits = slots % self.page_size != 0
        fits[fits] = self.owner[slots[fits]] == FREE
        if fits.any():
            # Two requests that share their last slot want the same next one: the first gets it.
            wanted = slots[fits]
            unique, first = np.unique(wanted, return_index=True)
            if len(unique) < len(wanted):
                index = np.flatnonzero(fits)
                fits[:] = False
                fits[index[first]] = True
            self._take_many(slots[fits])
        for i in np.flatnonzero(~fits).tolist():
            slots[i] = self._one(int(positions[i]))
        return slots

    def to_tree(self, slots: SlotArray) -> None:
        """The tree owns these private slots from now on."""
        assert (self.owner[slots] == PRIVATE).all(), "only private slots enter the tree"
        self.owner[slots] = TREE

    def free(self, slots: SlotArray) -> None:
        """Give owned slots back."""
        if len(slots) == 0:
            return
        assert self.owner[slots].all(), "freed twice"
        self.owner[slots] = FREE
        self._num_free += len(slots)
        size, free = self.page_size, self._free_in_page
        counts: dict[int, int] = {}
        for page in (slots // size).tolist():
            counts[page] = counts.get(page, 0) + 1
        for page, count in counts.items():
            free[page] += count
            if free[page] == size:
                self._broken.pop(page, None)
                self._whole.append(page)
            else:
                self._broken[page] = None

    def free_slots(self) -> SlotArray:
        """Every free slot, from the pool's own record."""
        owned = self.owner[self.page_size :]
        return (np.flatnonzero(owned == FREE) + self.page_size).astype(np.int32)

    def assert_consistent(self) -> None:
        """The counters, the page lists and the per-slot record tell the same."""
        size = self.page_size
        free = (self.owner.reshape(-1, size) == FREE).sum(1)
        free[0] = 0
        assert free.tolist() == self._free_in_page, "free slots of some page miscounted"
        assert int(free.sum()) == self._num_free, "free slots miscounted"
        assert len(set(self._whole)) == len(self._whole), "a page is listed twice"
        assert set(self._whole) == set(np.flatnonzero(free == size).tolist()), "whole pages"
        partial = set(np.flatnonzero((free > 0) & (free < size)).tolist())
        assert set(self._broken) == partial, "broken pages"

    def _take(self, slots: SlotArray) -> SlotArray:
        """Take free slots that lie in one page."""
        self.owner[slots] = PRIVATE
        self._num_free -= len(slots)
        page = int(slots[0]) // self.page_size
        self._free_in_page[page] -= len(slots)
        if self._free_in_page[page] == 0:
            self._broken.pop(page, None)
        else:
            self._broken[page] = None
        return slots

    def _one(self, position: int) -> int:
        """A slot for a request that grows, of a page where others are free, so that the next of its
        tokens may follow in place: of a whole page, or of the broken one that was asked last."""
        size = self.page_size
        if self._whole:
            page = self._whole.pop()
            slot = page * size + position % size
        else:
            page = next(iter(self._broken))
            del self._broken[page]
            slot = page * size + int(self.owner[page * size : (page + 1) * size].argmin())
        self.owner[slot] = PRIVATE
        self._num_free -= 1
        self._free_in_page[page] -= 1
        if self._free_in_page[page]:
            self._broken[page] = None
        return slot

    def _take_many(self, slots: SlotArray) -> None:
        self.owner[slots] = PRIVATE
        self._num_free -= len(slots)
        free = self._free_in_page
        for page in (slots // self.page_size).tolist():
            free[page] -= 1
            if not free[page]:
                self._broken.pop(page, None)
