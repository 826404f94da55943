"""What the engine tells one gateway: one columnar message a step, or fewer when it reads slowly."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..protocol.messages import Finish, PromptLogprobs, StepOut, TopLogprobs

_NO_LOGPROB = np.float32(np.nan)


class Outbox:
    """Collects a connection's columns until there is credit to send them. Steps merge without
    loss."""

    def __init__(self) -> None:
        self.credits = 0
        self._clear()

    def _clear(self) -> None:
        self._rids: list[npt.NDArray[np.int64]] = []
        self._tokens: list[npt.NDArray[np.int32]] = []
        self._logprobs: list[npt.NDArray[np.float32] | None] = []
        self._tops: dict[int, TopLogprobs] = {}
        self._prompts: list[PromptLogprobs] = []
        self._finished: list[Finish] = []
        self._count = 0

    @property
    def empty(self) -> bool:
        return not (self._rids or self._prompts or self._finished)

    def tokens(
        self,
        rids: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int32],
        logprobs: npt.NDArray[np.float32] | None,
    ) -> int:
        """Add columns; returns the index of the first, for `top`."""
        first = self._count
        self._rids.append(rids)
        self._tokens.append(tokens)
        self._logprobs.append(logprobs)
        self._count += len(rids)
        return first

    def top(self, column: int, top: TopLogprobs) -> None:
        self._tops[column] = top

    def prompt(self, logprobs: PromptLogprobs) -> None:
        self._prompts.append(logprobs)

    def finish(self, finish: Finish) -> None:
        self._finished.append(finish)

    def take(self) -> StepOut | None:
        """The message to send now, if there is something to say and credit to say it."""
        if self.empty or self.credits <= 0:
            return None
        self.credits -= 1
        logprobs = None
        if any(column is not None for column in self._logprobs):
            logprobs = np.concatenate(
                [
                    np.full(len(rids), _NO_LOGPROB, np.float32) if column is None else column
                    for rids, column in zip(self._rids, self._logprobs)
                ]
            ).tobytes()
        message = StepOut(
            rids=np.concatenate(self._rids).tobytes() if self._rids else b"",
            tokens=np.concatenate(self._tokens).tobytes() if self._tokens else b"",
            logprobs=logprobs,
            tops=self._tops,
            prompts=self._prompts,
            finished=self._finished,
        )
        self._clear()
        return message
