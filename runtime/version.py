"""Which ramet this is."""

from __future__ import annotations

import functools
import importlib.metadata


@functools.cache
def version() -> str:
    """The installed version; of a copy that runs without being installed, ``source``."""
    try:
        return importlib.metadata.version("ramet")
    except importlib.metadata.PackageNotFoundError:
        return "source"
