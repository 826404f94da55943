"""compute-sanitizer finds nothing to say of any kernel."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SANITIZER = shutil.which("compute-sanitizer")


HEAD_SIZES = (64, 80, 96, 128, 256)
PARTS = (
    *("linears", "elementwise", "choosing"),
    *(f"{kind}-{dim}" for kind in ("attention", "trees") for dim in HEAD_SIZES),
)


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.skipif(SANITIZER is None, reason="no compute-sanitizer here")
def test_no_kernel_reaches_outside_its_tensors(part):
    assert SANITIZER is not None
    script = Path(__file__).with_name("touch_kernels.py")
    run = subprocess.run(
        [SANITIZER, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, script, part],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert f"touched {part}" in run.stdout
    assert "ERROR SUMMARY: 0 errors" in run.stdout
