"""Who goes on in a row, and who waits for that."""

from __future__ import annotations

import time

import numpy as np
import pytest
from ramet.runtime.protocol.messages import EngineSampling
from ramet.runtime.scheduler.request import Request


def request(rid, tokens, **more):
    sampling = EngineSampling(max_new_tokens=4)
    return Request(rid, b"c", sampling, np.array(tokens, np.int32), len(tokens), **more)


@pytest.mark.parametrize(("waited", "goes_on"), [(1.0, True), (9.0, False)])
def test_who_waits_behind_one_that_was_sent_back_is_seen(make_world, waited, goes_on):
    """One that was sent back stands before all, and may have come last."""
    world = make_world(rows=1)
    leader = request(1, range(20), then=request(2, [3]))
    world.scheduler.add(leader)
    world.step()
    now = time.monotonic()
    world.scheduler.add(request(3, range(30, 50), arrival=now - waited))
    world.scheduler.waiting.insert(0, request(4, range(9), arrival=now, retractions=1))
    assert world.scheduler.go_on(leader, 20) is goes_on
