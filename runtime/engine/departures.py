"""How requests leave the engine: all of them, whatever their end, this way."""

from __future__ import annotations

import logging
from typing import Literal

from ..protocol.errors import AbortedError, ErrorInfo, RametError
from ..protocol.messages import Finish, NeedTokens
from ..scheduler.request import Request, follow
from ..scheduler.scheduler import Scheduler
from .connections import Connection, Connections
from .endings import Ending, Endings, Outcome
from .guides import Guides
from .recorder import Recorder, Unrecorded
from .tally import Tally, spans_of

log = logging.getLogger(__name__)


class Departures:
    """Takes requests off the scheduler, keeps their streams, tells their gateways."""

    def __init__(
        self,
        scheduler: Scheduler,
        connections: Connections,
        endings: Endings,
        guides: Guides | None,
        recorder: Recorder | Unrecorded,
        tally: Tally,
    ) -> None:
        self._scheduler = scheduler
        self._connections = connections
        self._endings = endings
        self._guides = guides
        self._recorder = recorder
        self._tally = tally

    def conclude(self, request: Request, outcome: Outcome) -> None:
        """End a request as its output says, if that says so."""
        if isinstance(outcome, Ending):
            reason, matched, text_bytes = outcome
            self._finish(request, reason, matched=matched, text_bytes=text_bytes)
        elif outcome is not None:
            self.fail(request, outcome)

    def fail(
        self,
        request: Request,
        error: RametError,
        *,
        removed: bool = False,
        poisoned: bool = False,
    ) -> None:
        """End a request by an error. ``removed``: the scheduler has let go of it; ``poisoned``: a
        retry must not find its KV cached."""
        self._finish(request, "abort", error=error, removed=removed, poisoned=poisoned)

    def abort(self, request: Request) -> None:
        """Its gateway does not want it any more."""
        self._finish(request, "abort")

    def forget(self, peer: Connection) -> None:
        """A gateway is gone: drop its work, release what it kept."""
        level = logging.WARNING if peer.requests else logging.INFO
        log.log(level, "a gateway is gone; dropping %d requests", len(peer.requests))
        for request in list(peer.requests.values()):
            self._forget_output(request)
            self._scheduler.remove(request)
        peer.requests.clear()
        peer.handles.clear()
        self._connections.drop(peer)

    def _forget_output(self, request: Request) -> None:
        self._endings.forget(request)
        if self._guides is not None:
            self._guides.forget(request)

    def _finish(
        self,
        request: Request,
        reason: Literal["stop", "length", "abort"],
        *,
        matched: bytes | int | None = None,
        text_bytes: int = -1,
        error: RametError | None = None,
        removed: bool = False,
        poisoned: bool = False,
    ) -> None:
        """Give back its row and KV, keep its stream if wanted, tell its gateway."""
        self._forget_output(request)
        peer = self._connections[request.connection]
        peer.requests.pop(request.rid, None)
        node, kept = None, None
        then = request.then
        if then is not None and then.rid in peer.requests:
            then = request.then = None  # somebody else has its number by now
        if then is not None and error is None and reason != "abort":
            kept = self._kept(peer, request, Ending(reason, matched, text_bytes))
        went_on = kept is not None and self._scheduler.go_on(request, kept)
        if not removed and not went_on:
            node = self._scheduler.remove(request, poisoned=poisoned)
        spans = spans_of(request)
        if request.keep is not None and reason != "abort":
            tokens = request.tokens[: request.line]
            peer.handles.keep(request.keep, tokens, node, request.namespace, request.remaining)
        for handle in request.marks:
            peer.handles.renew(handle, request.remaining)
        aborted = reason == "abort" and error is None
        self._recorder.ended(request, counted=not aborted)
        if aborted:
            error = AbortedError("the request was aborted")
        else:
            self._tally.finish(request)
        peer.outbox.finish(
            Finish(
                rid=request.rid,
                reason=reason,
                matched=matched,
                text_bytes=text_bytes,
                prompt_tokens=request.prompt_len,
                cached_tokens=max(request.cached_tokens, 0),
                forced_tokens=request.forced_tokens,
                error=None if error is None else ErrorInfo.of(error),
                grammar_s=spans.grammar,
                queue_s=spans.queue,
                prefill_s=spans.prefill,
                decode_s=spans.decode,
                divergence=request.divergence,
            )
        )
        if kept is not None:
            self._follow(peer, request, kept, went_on)

    def _kept(self, peer: Connection, request: Request, ending: Ending) -> int | None:
        """How many tokens stay of one where another goes on; ``None``, and its gateway told, where
        it has to say what comes behind them."""
        assert request.then is not None
        kept = None
        if request.row >= 0:
            rows = self._scheduler.rows
            output = rows.tokens[request.row, request.prompt_len : rows.known[request.row]]
            kept = self._endings.kept(request, output.tolist(), ending)
        if kept is None:
            self._connections.send(peer, NeedTokens(rid=request.then.rid))
        return kept

    def _follow(self, peer: Connection, request: Request, kept: int, went_on: bool) -> None:
        """What goes on where a request has ended is one of its own from now on: in the row, or in
        the queue."""
        then = request.then
        assert then is not None
        if not went_on:
            try:
                follow(request, kept, then)
                self._scheduler.add(then)
            except RametError as failure:
                error = ErrorInfo.of(failure)
                peer.outbox.finish(Finish(rid=then.rid, reason="abort", error=error))
                return
        peer.requests[then.rid] = then
        self._endings.watch(then)
