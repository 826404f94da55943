"""Blocks of KV in host memory: which row holds which, and who goes when all are taken."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator


class HostTier:
    """Every row is free, taken (being filled for somebody), or holds the block of one name. Rows
    are given out by `take`, oldest block out; what is held stays where it is."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._free = list(range(num_rows - 1, -1, -1))
        self._taken: set[int] = set()
        self._rows: OrderedDict[bytes, int] = OrderedDict()
        self._held: Counter[bytes] = Counter()
        self.evicted = 0
        """Blocks that made way for others."""

    def __contains__(self, name: bytes) -> bool:
        return name in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[bytes]:
        """Names, the one used longest ago first."""
        return iter(self._rows)

    def row(self, name: bytes) -> int:
        return self._rows[name]

    def touch(self, names: Iterable[bytes]) -> None:
        """These were used, the last of them latest. Of a path give the end first: a block is of no
        use without those before it."""
        for name in names:
            if name in self._rows:
                self._rows.move_to_end(name)

    def take(self) -> int | None:
        """A row to be filled: a free one, or that of the oldest block that nobody holds."""
        if not self._free:
            oldest = next((name for name in self._rows if not self._held[name]), None)
            if oldest is None:
                return None
            self._free.append(self._rows.pop(oldest))
            self.evicted += 1
        row = self._free.pop()
        self._taken.add(row)
        return row

    def enter(self, name: bytes, row: int) -> None:
        """A row that was taken holds this block from now on; if another does already, it is
        free."""
        self._taken.remove(row)
        if name in self._rows:
            self._free.append(row)
        else:
            self._rows[name] = row

    def give_back(self, row: int) -> None:
        """A row that was taken came to nothing."""
        self._taken.remove(row)
        self._free.append(row)

    def hold(self, names: Iterable[bytes]) -> None:
        """These blocks, which are here, stay until `release`."""
        for name in names:
            assert name in self._rows, "held what is not here"
            self._held[name] += 1

    def release(self, names: Iterable[bytes]) -> None:
        """Take one `hold` back."""
        for name in names:
            assert self._held[name] > 0, "released more often than held"
            self._held[name] -= 1
            if not self._held[name]:
                del self._held[name]

    def clear(self) -> int:
        """Forget every block that nobody holds. Returns how many went."""
        gone = [name for name in self._rows if not self._held[name]]
        for name in gone:
            self._free.append(self._rows.pop(name))
        return len(gone)

    def assert_consistent(self) -> None:
        """Every row is in exactly one of the three sets."""
        rows = sorted([*self._free, *self._taken, *self._rows.values()])
        assert rows == list(range(self.num_rows)), "a row is in two sets, or in none"
        assert all(name in self._rows for name in self._held), "something is held that is gone"
        assert all(count > 0 for count in self._held.values())
