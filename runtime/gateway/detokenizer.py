"""Token ids to text that can be shown, as they come."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet


def find_stop(data: bytes, stops: Sequence[bytes], start: int = 0) -> tuple[int, int, int] | None:
    """The stop string that completes first in ``data[start:]``: its (begin, end, index in stops).

    Of several that end at the same byte, the one that begins first. None where there is none.
    """
    best: tuple[int, int, int] | None = None
    for index, stop in enumerate(stops):
        begin = data.find(stop, start) if stop else -1
        if begin >= 0 and (best is None or (begin + len(stop), begin) < (best[1], best[0])):
            best = (begin, begin + len(stop), index)
    return best


class Detokenizer:
    """The text of one request.

    `push` gives what is certain: whole characters only, and nothing that may turn out to be the
    beginning of a stop string. `finish` gives the rest. The pieces join to `text`.
    """

    def __init__(
        self,
        bytes_table: Sequence[bytes],
        special_ids: AbstractSet[int] = frozenset(),
        skip_special: bool = True,
        stops: Sequence[bytes] = (),
        special_text: dict[int, bytes] | None = None,
        skip_bytes: int = 0,
    ) -> None:
        """``special_text``: what special tokens look like, for ``skip_special=False``.
        ``skip_bytes``: how many of the first bytes are not text."""
        self._skip = skip_bytes
        self._table = bytes_table
        self._shown = {} if skip_special else dict(special_text or {})
        self._special = special_ids
        self._stops = tuple(stop for stop in stops if stop)
        self._held = b""
        """Bytes that the decoder has not seen: a stop string may begin here."""
        self._fed = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pieces: list[str] = []
        self._stopped = False

    @property
    def text(self) -> str:
        """All that `push` and `finish` have given."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was completed; nothing after it is text."""
        return self._stopped

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens; the new text that can be shown."""
        if self._stopped:
            return ""
        data = b"".join(map(self._bytes, token_ids))
        if self._skip:
            data, self._skip = data[self._skip :], max(self._skip - len(data), 0)
        data = self._held + data
        match = find_stop(data, self._stops) if self._stops else None
        if match is not None:
            self._stopped = True
            self._held = b""
            return self._feed(data[: match[0]])
        safe = len(data) - self._undecided(data)
        self._held = data[safe:]
        return self._feed(data[:safe])

    def finish(self, text_bytes: int = -1) -> str:
        """The rest of the text. ``text_bytes``: how many bytes of all output are text, as whoever
        matched the stop string counted; -1: all of it. Broken bytes become U+FFFD only now."""
        rest = b"" if self._stopped else self._held
        if text_bytes >= 0:
            rest = rest[: max(0, text_bytes - self._fed)]
        self._held = b""
        self._stopped = True
        self._fed += len(rest)
        return self._keep(self._decoder.decode(rest, final=True))

    def _bytes(self, token: int) -> bytes:
        if token in self._special:
            return self._shown.get(token, b"")
        return self._table[token]

    def _feed(self, data: bytes) -> str:
        self._fed += len(data)
        return self._keep(self._decoder.decode(data))

    def _keep(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece

    def _undecided(self, data: bytes) -> int:
        """Length of the longest tail that is a proper beginning of some stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(data)), longest, -1):
                if data.endswith(stop[:length]):
                    longest = length
                    break
        return longest
