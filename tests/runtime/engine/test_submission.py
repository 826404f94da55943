"""What cannot be computed is refused before it reaches a step."""

from __future__ import annotations

import numpy as np
import pytest
from ramet.runtime.engine.handles import Handles
from ramet.runtime.engine.submission import request_of
from ramet.runtime.memory.kv_memory import KVMemory
from ramet.runtime.protocol import BadInputError
from ramet.runtime.protocol.messages import EngineSampling, Submit

IDS = np.array([1, 2], np.int32).tobytes()


@pytest.fixture
def handles():
    handles = Handles(KVMemory(32, 16).tree)
    handles.keep(1, np.arange(5, dtype=np.int32), None)
    return handles


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_tokens": 1 << 40}, "max_new_tokens"),
        ({"min_new_tokens": 1 << 31}, "min_new_tokens"),
        ({"top_k": 1 << 31}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"top_logprobs": 27}, "top_logprobs"),
        ({"seed": 1 << 63}, "seed"),
        ({"stop_ids": (3, 26)}, "stop_ids"),
        ({"stop_ids": (3,) * 1025}, "stop_ids"),
        ({"bias_ids": (-1,), "bias_values": (1.0,)}, "bias_ids"),
        ({"bias_ids": (1, 2), "bias_values": (1.0,)}, "bias_values"),
        ({"stops": (b"a", b"")}, "stops"),
    ],
)
def test_sampling_that_no_step_could_hold(handles, wrong, param):
    sampling = EngineSampling(**{"max_new_tokens": 1, **wrong})
    with pytest.raises(BadInputError) as caught:
        request_of(Submit(rid=1, ids=IDS, sampling=sampling), b"c", handles, 26)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("rid", "ids", "param"),
    [
        (1 << 63, IDS, "rid"),
        (1, IDS[:-1], "ids"),
        (1, np.array([26], np.int32).tobytes(), "ids"),
        (1, np.array([-1], np.int32).tobytes(), "ids"),
    ],
)
def test_ids_that_are_none(handles, rid, ids, param):
    message = Submit(rid=rid, ids=ids, sampling=EngineSampling(max_new_tokens=1))
    with pytest.raises(BadInputError) as caught:
        request_of(message, b"c", handles, 26)
    assert caught.value.param == param


@pytest.mark.parametrize(("length", "want"), [(0, [1, 2]), (5, [0, 1, 2, 3, 4, 1, 2])])
def test_a_prompt_begins_with_what_its_handle_holds(handles, length, want):
    message = Submit(
        rid=1, ids=IDS, base=1, base_len=length, sampling=EngineSampling(max_new_tokens=1)
    )
    request = request_of(message, b"c", handles, 26)
    assert request is not None
    assert request.tokens.tolist() == want
    assert request.prompt_len == len(want)


@pytest.mark.parametrize(("base", "length"), [(1, 6), (1, -1), (2, 0)])
def test_a_handle_without_these_tokens(handles, base, length):
    message = Submit(
        rid=1, ids=IDS, base=base, base_len=length, sampling=EngineSampling(max_new_tokens=1)
    )
    assert request_of(message, b"c", handles, 26) is None
