"""Whether KV that lies elsewhere is loaded or computed again: by what both took until now."""

from __future__ import annotations

_FADE = 0.9
"""What is known counts for so much less with every new measurement."""
_RELENT = 0.97
"""So much of its price a way of loading keeps each time it is found too dear: the machine may have
been busy when it was measured, and only a load can tell."""


class Rate:
    """Seconds for one unit of work, over the last measurements; larger ones count for more."""

    def __init__(self) -> None:
        self._units = self._seconds = 0.0

    def add(self, units: float, seconds: float) -> None:
        if units <= 0 or seconds < 0:
            return
        self._units = _FADE * self._units + units
        self._seconds = _FADE * self._seconds + seconds

    def relent(self) -> None:
        self._seconds *= _RELENT

    def of(self, units: float) -> float | None:
        """Seconds for so many units; ``None`` if nothing was measured yet."""
        return self._seconds / self._units * units if self._units else None

    @property
    def per_second(self) -> float:
        """0: not known."""
        return self._units / self._seconds if self._seconds else 0.0


class TierCosts:
    """What prompts cost to compute (tokens), host memory to copy and disk to read (bytes)."""

    def __init__(self) -> None:
        self.compute, self.copy, self.read = Rate(), Rate(), Rate()

    def pays(self, tokens: int, copied: int, read: int) -> bool:
        """Whether to copy and read so many bytes rather than compute so many tokens. What was never
        measured costs nothing: trying is how it is learnt."""
        computing = self.compute.of(tokens)
        if computing is None:
            return True
        if (self.copy.of(copied) or 0.0) + (self.read.of(read) or 0.0) < computing:
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
