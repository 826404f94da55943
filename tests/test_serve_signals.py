"""A signal that comes while another is being handled stops a server like one alone."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

SCRIPT = """
import inspect, os, signal, threading
from types import SimpleNamespace
from ramet import cli_serve
from ramet.runtime import launch

stops = []
launch.start = lambda *_, **__: SimpleNamespace(
    addresses=[], model="m", url="u", check=lambda: None, stop=stops.append,
    config=SimpleNamespace(drain_seconds=1.0),
)
cli_serve.with_model = lambda settings, _: settings
notify_all = threading.Condition.notify_all

def interrupted(condition):
    os.kill(os.getpid(), signal.SIGTERM)
    notify_all(condition)

# Whoever tells a waiting thread of the first signal is in the middle of that when the next comes.
threading.Condition.notify_all = interrupted
given = inspect.signature(cli_serve.serve).parameters.items()
cli_serve.serve(**{name: None if name == "model" else one.default for name, one in given})
assert stops == [1.0 + launch.STOP_SECONDS, 0.0], stops
print("stopped")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_within_a_signal(number):
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", SCRIPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert "is served" in process.stdout.readline()
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 0, err[-2000:]
    assert out == "stopped\n"
