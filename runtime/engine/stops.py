"""Stop strings, matched on bytes in the step in which they complete."""

from __future__ import annotations


class StopMatcher:
    """Follows one request's output bytes.

    Only a tail shorter than the longest stop string is kept, so that a stop may begin in any
    earlier token and end in this one."""

    def __init__(self, stops: tuple[bytes, ...]) -> None:
        self._stops = stops
        self._keep = max(map(len, stops)) - 1
        self._tail = b""
        self._offset = 0

    def push(self, token: bytes) -> tuple[bytes, int] | None:
        """Add a token's bytes. Returns the stop string that completes first (the one that begins
        first, of several), and how many bytes of output stand before it. Whoever goes on after a
        hit is told of stops that end in later tokens only."""
        data = self._tail + token
        best: tuple[int, int, bytes] | None = None
        for stop in self._stops:
            start = data.find(stop, max(0, len(self._tail) - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        hit = None if best is None else (best[2], self._offset + best[1])
        cut = max(0, len(data) - self._keep)
        self._offset += cut
        self._tail = data[cut:]
        return hit
