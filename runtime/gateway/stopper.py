"""Ends generations before their time, with what they have made so far."""

from __future__ import annotations

from ..protocol.messages import Finish
from .request import EngineRequest


class Stopper:
    """Given to generations when they are made. Once stopped, those that begin later end at once."""

    __slots__ = ("_requests", "_why")

    def __init__(self) -> None:
        self._requests: list[EngineRequest] = []
        self._why: str | None = None

    def watch(self, request: EngineRequest) -> None:
        self._requests.append(request)
        if self._why is not None:
            self._end(request, self._why)

    def stop(self, why: str) -> None:
        """Their finish reason is ``abort``, with ``why`` as its message."""
        self._why = why
        for request in self._requests:
            self._end(request, why)

    def _end(self, request: EngineRequest, why: str) -> None:
        if request.finish is None and request.error is None:
            request.end(Finish(rid=request.rid, reason="abort", message=why), None)
