"""Whether KV that lies elsewhere is loaded or computed again: by what both took until now."""

from __future__ import annotations

_FADE = 0.9
"""What is known counts for so much less with every new measurement."""
_RELENT = 0.97
"""So much of its price a way of loading keeps each time it is found too dear: the machine may have
been busy when it was measured, and only a load can tell."""
_SPREAD = 0.1
"""Sizes that differ by less than this share of their mean say nothing of what the first unit
costs."""


class Cost:
    """Seconds of a piece of work by its size: a line through the last measurements, neither part of
    which is negative. Where they do not make one, it goes through nothing."""

    def __init__(self) -> None:
        self._count = self._units = self._seconds = self._squares = self._products = 0.0

    def add(self, units: float, seconds: float) -> None:
        if units <= 0 or seconds < 0:
            return
        self._count = _FADE * self._count + 1
        self._units = _FADE * self._units + units
        self._seconds = _FADE * self._seconds + seconds
        self._squares = _FADE * self._squares + units * units
        self._products = _FADE * self._products + units * seconds

    def relent(self) -> None:
        self._seconds *= _RELENT
        self._products *= _RELENT

    def _line(self) -> tuple[float, float]:
        """Seconds of any work, and of each unit."""
        units, seconds = self._units / self._count, self._seconds / self._count
        spread = self._squares / self._count - units * units
        if spread > (_SPREAD * units) ** 2:
            each = (self._products / self._count - units * seconds) / spread
            if each > 0 and seconds - each * units >= 0:
                return seconds - each * units, each
        return 0.0, seconds / units

    def of(self, units: float) -> float | None:
        """Seconds for a piece of so many units; ``None`` if nothing was measured yet."""
        if not self._count:
            return None
        first, each = self._line()
        return first + each * units

    def more(self, units: float) -> float | None:
        """Seconds that so many units more make."""
        return self._line()[1] * units if self._count else None

    @property
    def per_second(self) -> float:
        """Units, beside other work; 0: not known."""
        each = self._line()[1] if self._count else 0.0
        return 1.0 / each if each else 0.0


class TierCosts:
    """What prompts cost to compute (tokens), host memory to copy and disk to read (bytes)."""

    def __init__(self) -> None:
        self.compute, self.copy, self.read = Cost(), Cost(), Cost()

    def pays(self, tokens: int, copied: int, read: int) -> bool:
        """Whether to copy and read so many bytes rather than compute so many tokens, in steps that
        are needed for others anyhow. What was never measured costs nothing: trying is how it is
        learnt."""
        computing = self.compute.more(tokens)
        if computing is None:
            return True
        loading = self.copy.of(copied) or 0.0
        if read:
            loading += self.read.of(read) or 0.0
        if loading < computing:
            return True
        self.copy.relent()
        if read:
            self.read.relent()
        return False

    def facts(self) -> dict[str, float]:
        """For metrics: tokens a second computed, bytes a second copied and read; 0: not known."""
        return {
            "compute_tokens_per_s": self.compute.per_second,
            "copy_bytes_per_s": self.copy.per_second,
            "read_bytes_per_s": self.read.per_second,
        }
