"""What a step sampled: known to the rows, told to the gateways, and the end of some requests."""

from __future__ import annotations

import numpy as np

from ..protocol.errors import RametError
from ..scheduler.batch import StepResult
from ..scheduler.building import Planned
from ..scheduler.request import Request
from ..scheduler.rows import Rows
from .departures import Departures
from .endings import Ending, Endings, Outcome
from .guided import Guided
from .outputs import Outputs
from .tally import Tally

NAN_LOGITS = "the model produced NaN logits for this request"
NONE_ALLOWED = "no token that the request allows is left"


class Samples:
    """Takes a step's samples in, row by row only where a row may end or is told what to say."""

    def __init__(
        self,
        rows: Rows,
        outputs: Outputs,
        endings: Endings,
        guided: Guided | None,
        departures: Departures,
        tally: Tally,
    ) -> None:
        self._rows = rows
        self._outputs = outputs
        self._endings = endings
        self._guided = guided
        self._departures = departures
        self._tally = tally

    def take_in(self, planned: Planned, result: StepResult) -> None:
        """Enter a step's samples, end what ends, tell the gateways."""
        bad_scores = self._outputs.prompt_logprobs(planned, result)
        for request in (*bad_scores, *self._outputs.tries(planned, result)):
            self._departures.fail(request, RametError(NAN_LOGITS), poisoned=True)
        rows = self._rows
        alive = rows.epoch[planned.rows] == planned.epochs
        at, tokens, bad = planned.rows, result.tokens, result.bad
        if not alive.all():
            at, tokens, bad = at[alive], tokens[alive], bad[alive]
        known = rows.known[at]
        rows.tokens[at, known] = tokens
        rows.known[at] = known + 1
        made = known + 1 - rows.prompt_len[at]
        stopped = (rows.stop_ids[at] == tokens[:, None]).any(1) & (made > rows.min_new[at])
        full = made >= rows.max_new[at]
        self._tally.sampled(rows, at)
        self._outputs.tokens(at, tokens, result, alive)
        watched = bad | stopped | full | rows.stop_strings[at] | rows.healing[at]
        if self._guided is not None:
            guided = rows.masked[at] & ~watched
            for request, outcome in self._guided.go_on(at[guided], tokens[guided]):
                self._departures.conclude(request, outcome)
        for i in np.flatnonzero(watched).tolist():
            request = rows.requests[at[i]]
            assert request is not None
            if bad[i]:
                # Its KV may hold NaNs too: a retry must not find it cached.
                error = RametError(NONE_ALLOWED if rows.masked[at[i]] else NAN_LOGITS)
                self._departures.fail(request, error, poisoned=True)
                continue
            outcome = self._outcome(
                request, int(tokens[i]), int(made[i]), bool(stopped[i]), bool(full[i])
            )
            self._departures.conclude(request, outcome)
        for request in planned.ended:
            if request.row >= 0:
                self._departures.conclude(request, Ending("length"))

    def _outcome(
        self, request: Request, token: int, made: int, stopped: bool, full: bool
    ) -> Outcome:
        """Where a request stands after the ``made``-th token of its output."""
        rows, row, guided = self._rows, request.row, self._guided
        if rows.healing[row]:
            assert guided is not None
            return guided.heal(request, token)
        if stopped:
            return Ending("stop", token)
        if rows.stop_strings[row] and (hit := self._endings.stop_string(request, token, made)):
            return hit
        if rows.masked[row]:
            assert guided is not None
            return guided.follow(request, token)
        return Ending("length") if full else None
