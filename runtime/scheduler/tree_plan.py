"""Which keys of a decode step are read once for several of its items."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(slots=True)
class TreePlan:
    """Segments, each read by several items, and what every item reads alone.

    Item i's positions are those of the segments it reads, which follow each other from 0 on, then
    [tails[i], its length). Plans of one version are the same object; all arrays are int32.
    """

    version: int
    starts: npt.NDArray[np.int32]
    """[S] first position of each segment, ..."""
    ends: npt.NDArray[np.int32]
    """... and the one after its last."""
    reader_starts: npt.NDArray[np.int32]
    """[S + 1]: segment s is read by readers[reader_starts[s] : reader_starts[s + 1]]. Of positions
    in it, all of them have the same slots."""
    readers: npt.NDArray[np.int32]
    """Items of the batch."""
    tails: npt.NDArray[np.int32]
    """[B]"""
    saved: int = 0
    """Keys that are not read, less what sharing costs."""
