"""Many outputs of llguidance at once, in threads of the library's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .llguidance_matcher import LLGuidanceMatcher

if TYPE_CHECKING:
    from llguidance import LLExecutor


class SideBySide:
    """Does for several matchers what each could do alone. Nothing is raised: what went wrong is in
    the error state of a matcher, which sees it when it is asked next."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._made: LLExecutor | None = None

    @property
    def _executor(self) -> LLExecutor:
        if self._made is None:
            from llguidance import LLExecutor

            self._made = LLExecutor(self._threads)
        return self._made

    def fill(
        self, masks: npt.NDArray[np.int32], wanted: Sequence[tuple[LLGuidanceMatcher, int]]
    ) -> None:
        """Compute row i of ``masks`` [M, ceil(V / 32)], contiguous, for each (matcher, i) of those
        that `LLGuidanceMatcher.computes` said must be."""
        self._executor.unsafe_compute_mask_ptr(
            [(matcher.inner, i) for matcher, i in wanted],
            masks.ctypes.data,
            masks.strides[0],
            len(masks),
        )

    def accept(self, wanted: Sequence[tuple[LLGuidanceMatcher, int]]) -> list[bool]:
        """Have each matcher's library take a token that `LLGuidanceMatcher.asks_library` is for;
        which did, and now await `LLGuidanceMatcher.took`."""
        return self._executor.consume_token_par(
            [(matcher.inner, token) for matcher, token in wanted]
        )
