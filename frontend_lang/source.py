"""Which line of the user's code an operation comes from."""

from __future__ import annotations

import sys
from types import FrameType


def here() -> str:
    """``file.py:12`` of the innermost frame outside this package ('' if there is none)."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name != "ramet" and not name.startswith("ramet."):
            path = frame.f_code.co_filename.replace("\\", "/")
            return f"{path.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
