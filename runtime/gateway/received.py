"""What an engine's step made, given to the requests that it is for."""

from __future__ import annotations

import numpy as np

from ..protocol.errors import AbortedError, RametError
from ..protocol.messages import Finish, StepOut
from .request import EngineRequest


def enter_step(step: StepOut, requests: dict[int, EngineRequest], now: float) -> list[float]:
    """Tokens, log-probs and ends go to their requests; those that end leave ``requests``, and who
    waits is woken. ``now``, on the monotonic clock, is when the step came.

    Returns the seconds between each token and the one before of the same request.
    """
    rids = np.frombuffer(step.rids, np.int64).tolist()
    touched: list[EngineRequest] = []
    gaps: list[float] = []
    for rid, token in zip(rids, np.frombuffer(step.tokens, np.int32).tolist()):
        request = requests.get(rid)
        if request is not None:
            request.tokens.append(token)
            if request.first_token_at is None:
                request.first_token_at = now
            else:
                gaps.append(now - request.last_token_at)
            request.last_token_at = now
            if request.streaming:
                touched.append(request)
    if step.logprobs is not None:
        _enter_logprobs(step, rids, requests)
    for piece in step.prompts:
        request = requests.get(piece.rid)
        if request is not None:
            request.add_prompt_logprobs(piece)
    for finish in step.finished:
        request = requests.pop(finish.rid, None)
        if request is not None:
            if request.then is not None:
                request.then.since = now
            request.end(finish, _failure(finish))
    for request in touched:
        request.wake()
    return gaps


def _enter_logprobs(step: StepOut, rids: list[int], requests: dict[int, EngineRequest]) -> None:
    assert step.logprobs is not None
    for column, value in enumerate(np.frombuffer(step.logprobs, np.float32).tolist()):
        request = requests.get(rids[column])
        if request is not None and request.sampling.logprobs:
            request.logprobs.append(value)
            request.tops.append(step.tops.get(column))


def _failure(finish: Finish) -> RametError | None:
    if finish.error is not None:
        return finish.error.exception()
    if finish.reason == "abort":
        return AbortedError(finish.message or "the engine aborted the request")
    return None
