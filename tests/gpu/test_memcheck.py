"""compute-sanitizer finds nothing to say of any kernel."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SANITIZER = shutil.which("compute-sanitizer")


@pytest.mark.slow
@pytest.mark.skipif(SANITIZER is None, reason="no compute-sanitizer here")
def test_no_kernel_reaches_outside_its_tensors():
    assert SANITIZER is not None
    script = Path(__file__).with_name("touch_kernels.py")
    run = subprocess.run(
        [SANITIZER, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, script],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert "choosing" in run.stdout
    assert "ERROR SUMMARY: 0 errors" in run.stdout
