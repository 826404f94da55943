"""What a step made, into the outboxes of the gateways that asked for it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..protocol.messages import PromptLogprobs, TopLogprobs
from ..scheduler.batch import IntArray, PositionLogprobs, StepResult
from ..scheduler.building import Planned
from ..scheduler.request import Request
from ..scheduler.rows import Rows
from .connections import Connections

_ALL = slice(None)


class Outputs:
    """Writes columns of tokens and log-probs to each connection's outbox."""

    def __init__(self, connections: Connections, rows: Rows) -> None:
        self._connections = connections
        self._rows = rows

    def tokens(
        self, at: IntArray, tokens: IntArray, result: StepResult, alive: npt.NDArray[np.bool_]
    ) -> None:
        """Tokens that rows ``at`` sampled; ``alive`` picks them out of the step's samples."""
        rows = self._rows
        peers = [request.connection for row in at if (request := rows.requests[row]) is not None]
        logprobs = None if result.logprobs is None else result.logprobs[alive]
        several = set(peers)
        for identity in several:
            mine = _ALL
            if len(several) > 1:
                mine = np.fromiter((peer == identity for peer in peers), np.bool_, len(peers))
            peer = self._connections[identity]
            column = peer.outbox.tokens(
                rows.rid[at[mine]], tokens[mine], None if logprobs is None else logprobs[mine]
            )
            if result.top_ids is None or result.top_values is None:
                continue
            top_ids, top_values = result.top_ids[alive][mine], result.top_values[alive][mine]
            for i, wanted in enumerate(rows.top_logprobs[at[mine]].tolist()):
                if wanted:
                    peer.outbox.top(column + i, _top(top_ids[i, :wanted], top_values[i, :wanted]))

    def forced(self, request: Request, tokens: list[int]) -> None:
        """Tokens that a request's grammar appended to its output."""
        self._connections[request.connection].outbox.tokens(
            np.full(len(tokens), request.rid, np.int64), np.array(tokens, np.int32), None
        )

    def tries(self, planned: Planned, result: StepResult) -> list[Request]:
        """Log-probs of tries. Returns the requests for which the model gave NaN."""
        bad: list[Request] = []
        for (request, start), values in zip(planned.tries, result.tries):
            peer = self._connections.get(request.connection)
            if peer is None or peer.requests.get(request.rid) is not request:
                continue
            if np.isnan(values).any():
                bad.append(request)
                continue
            data = values.astype("<f4").tobytes()
            peer.outbox.prompt(PromptLogprobs(rid=request.rid, start=start, values=data))
        return bad

    def prompt_logprobs(self, planned: Planned, result: StepResult) -> list[Request]:
        """Log-probs of prompts. Returns the requests for which the model gave NaN."""
        bad: list[Request] = []
        for (request, start), found in zip(planned.scored, result.prompt_logprobs):
            peer = self._connections.get(request.connection)
            if peer is None or peer.requests.get(request.rid) is not request:
                continue
            if np.isnan(found.values).any():
                bad.append(request)
                continue
            peer.outbox.prompt(
                PromptLogprobs(
                    rid=request.rid,
                    start=start,
                    values=found.values.astype("<f4").tobytes(),
                    top=_tops(found, request.sampling.top_logprobs),
                )
            )
        return bad


def _top(ids: IntArray, values: npt.NDArray[np.float32]) -> TopLogprobs:
    return TopLogprobs(ids=ids.astype("<i4").tobytes(), values=values.astype("<f4").tobytes())


def _tops(found: PositionLogprobs, wanted: int) -> list[TopLogprobs]:
    if not wanted or found.top_ids is None or found.top_values is None:
        return []
    return [
        _top(ids[:wanted], values[:wanted]) for ids, values in zip(found.top_ids, found.top_values)
    ]
