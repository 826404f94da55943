"""What a child process tells its launcher."""

from __future__ import annotations

import json
import subprocess
import sys

READY = """
import gc
from ramet.runtime.child import tell_ready, tell_stage
tell_stage("weights")
before = gc.get_freeze_count()
tell_ready(port=1)
print(gc.get_freeze_count() - before)
"""


def test_what_the_start_made_is_out_of_the_collectors_way():
    run = subprocess.run(
        [sys.executable, "-P", "-c", READY], capture_output=True, text=True, check=True
    )
    stage, ready, frozen = run.stdout.splitlines()
    assert json.loads(stage) == {"stage": "weights"}
    assert json.loads(ready) == {"ready": True, "port": 1}
    assert int(frozen) > 1000
