"""For all tests."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """A shell that runs tests in the background has them, and all they start, ignore Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
