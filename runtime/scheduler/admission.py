"""Whether one more request fits, now and later."""

from __future__ import annotations

import numpy as np

from .loading import Loading
from .rows import Rows

WATERMARK = 0.98
"""Of all slots. What the forecast leaves free absorbs its errors."""
LONGEST_FORECAST = 4096
"""Tokens of output that are forecast at most: few requests use all that they may."""
_START, _FLOOR, _DECAY, _RAISE = 0.7, 0.1, 0.995, 0.2


class Admission:
    """Forecasts the peak of KV use, as LightLLM's past-future scheduler does (arXiv 2507.10150): of
    requests sorted by what remains of them, the k-th still runs when the longer ones do.

    How much of ``max_new_tokens`` is really used is learnt: the ratio falls while all goes well and
    rises when a request had to be retracted.
    """

    def __init__(
        self,
        rows: Rows,
        total: int,
        conservativeness: float = 1.0,
        loading: Loading | None = None,
    ) -> None:
        self._loading = loading
        self._rows = rows
        self._total = total
        self._conservativeness = conservativeness
        self._ratio = _START

    def step(self) -> None:
        """A step went by without a retraction."""
        self._ratio = max(_FLOOR, self._ratio * _DECAY)

    def retracted(self) -> None:
        """The forecast was wrong."""
        self._ratio = min(1.0, self._ratio + _RAISE)

    def peak(self, prompt: int, new: int) -> float:
        """What the running requests will hold at most beside slots of the tree, and with them one
        that will hold ``prompt`` private slots and sample ``new`` tokens."""
        rows = self._rows
        live = rows.state.nonzero()[0]  # those that are not EMPTY
        count = len(live)
        own, left = np.empty(count + 1, np.int64), np.empty(count + 1)
        np.maximum(rows.computed[live], rows.target[live], out=own[:count])
        own[:count] -= rows.shared[live]
        np.subtract(rows.max_new[live], rows.sampled[live], out=left[:count])
        own[count], left[count] = prompt, new
        np.minimum(left, LONGEST_FORECAST, out=left)
        left *= self._ratio * self._conservativeness
        order = (-left).argsort()
        return float((own[order].cumsum() + left[order] * np.arange(1, count + 2)).max())

    def fits(self, locked: int, prompt: int, new: int, peak: float) -> bool:
        """Whether a request with this `peak` fits beside the running ones and those whose KV is
        being loaded, when ``locked`` slots of the tree are held by all of them."""
        if self._loading is not None:
            locked += self._loading.claimed
        if self._rows.running == 0:
            return locked + prompt + min(new, 1) <= self._total
        return locked + peak <= self._total * WATERMARK
