"""Every kernel compiles for an H200 with the shapes of real models, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SHARED_LIMIT = 232448
HOT = (
    "decode_kernel",
    "extend_kernel",
    "few_rows_kernel",
    "invariant_kernel",
    "merge_kernel",
    "merge_lists_kernel",
    "mid_rows_kernel",
    "one_row_kernel",
    "rms_norm_kernel",
    "rope_write_kernel",
    "sum_parts_kernel",
    "pieces_kernel",
)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen2.5-1.5b", "smollm2-135m"])
def test_kernels_compile_for_hopper(model, tmp_path):
    # A process of its own: Triton must not be in its interpreter's mode.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, Path(__file__).with_name("compile_kernels.py"), model],
        capture_output=True,
        text=True,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert run.returncode == 0, run.stderr[-4000:]
    kernels = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(kernels) > 10
    for one in kernels:
        name = f"{one['kernel']} {one['constants']}"
        assert one["shared"] <= SHARED_LIMIT, f"{name} needs {one['shared']} bytes of shared memory"
        if one["kernel"] in HOT:
            # The assembler may park an address or two of a short loop; more would cost.
            assert one["spills"] <= 16, f"{name} spills {one['spills']} bytes"
        if one["kernel"] in ("decode_kernel", "pieces_kernel"):
            assert one["cp.async"] > 0, f"{name} does not load ahead"
        tall = one["kernel"] in ("extend_kernel", "invariant_kernel", "pieces_kernel")
        if tall and one["constants"]["BLOCK_M"] >= 64:
            assert one["wgmma"] > 0, f"{name} is not on the fast tensor path"
        if one["kernel"] == "mid_rows_kernel":
            assert one["wgmma"] > 0, f"{name} is not on the fast tensor path"
            assert one["cp.async"] > 0, f"{name} does not load ahead"
        if one["launch_pdl"]:
            assert one["griddepcontrol"] == 2, f"{name} must wait once and release once"
