"""Who watches requests come and go, for metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .request import EngineRequest


class Observer:
    """Told of all requests to one engine. This one takes no note of them."""

    def began(self) -> None:
        """A request was sent off."""

    def restarted(self) -> None:
        """The engine was gone and is back."""

    def gaps(self, seconds: Sequence[float]) -> None:
        """Tokens have come, so long after the ones before of the same requests."""

    def ended(self, request: EngineRequest, began: float, counts_prompt: bool) -> None:
        """A request is over, in one way or another. ``began`` is on the monotonic clock. Of several
        samples of one prompt, one counts it."""
