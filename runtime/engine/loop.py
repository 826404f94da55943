"""The engine: messages in, steps, messages out. One step is `Engine.step`, on one screen."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..model.runner import Runner, Ticket
from ..protocol.errors import AbortedError, ErrorInfo, RametError
from ..protocol.messages import (
    Abort,
    Answer,
    Ask,
    Credit,
    EngineMessage,
    Finish,
    NeedTokens,
    PromptLogprobs,
    Release,
    Submit,
    TopLogprobs,
)
from ..scheduler.batch import IntArray, PositionLogprobs, StepResult
from ..scheduler.building import Planned
from ..scheduler.request import Request
from ..scheduler.scheduler import MustDrain, Scheduler
from .connections import BEAT_SECONDS, Connection, Connections
from .stops import StopMatcher
from .submission import request_of

log = logging.getLogger(__name__)

CHECK_EVERY = 4096
"""Steps between two checks, in production, that every slot has exactly one owner."""


class Engine:
    """Drives scheduler and runner. On an asynchronous runner the next step is planned and launched
    before this one's samples are read; a row that turns out finished is then dropped, once."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        connections: Connections,
        token_bytes: Sequence[bytes],
        facts: dict[str, Any] | None = None,
        *,
        overlap: bool = True,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.connections = connections
        self._token_bytes = token_bytes
        self.facts = facts or {}
        self._depth = 1 if overlap and runner.asynchronous else 0
        self._flights: deque[tuple[Planned, Ticket]] = deque()
        self._matchers: dict[int, StopMatcher] = {}
        self._asked: list[tuple[Connection, int]] = []
        self.stopping = False
        self.steps = 0
        self.totals = dict.fromkeys(
            ("finished", "prompt_tokens", "cache_hit_tokens", "computed_tokens", "output_tokens"), 0
        )

    def run(self) -> None:
        """Until told to shut down. Raises what a step raised: it may have left anything half done,
        so the engine ends. Either way the sockets close first, by which gateways know at once."""
        try:
            while not self.stopping:
                self.step()
        except Exception:
            log.critical("step %d failed; the engine ends", self.steps, exc_info=True)
            raise
        finally:
            self.connections.close()
        self.runner.close()

    def stop(self) -> None:
        """End after the step that runs. Safe in a signal handler."""
        self.stopping = True

    def step(self) -> None:
        """Take in messages, launch one step, hand out the samples of the one before."""
        idle = self.scheduler.idle and not self._flights
        for peer, message in self.connections.receive(BEAT_SECONDS if idle else 0):
            self._take_in(peer, message)
        try:
            planned = self.scheduler.plan(drained=not self._flights)
        except MustDrain:
            planned = None
        if planned is not None:
            self._flights.append((planned, self.runner.launch(planned.batch)))
            self.totals["computed_tokens"] += planned.batch.num_tokens
            self.steps += 1
            if self.steps % CHECK_EVERY == 0:
                self.scheduler.assert_consistent()
        if self._flights and (planned is None or len(self._flights) > self._depth):
            landed, ticket = self._flights.popleft()
            self._hand_out(landed, ticket.result())
        for request, error in self.scheduler.failed:
            self._finish(request, "abort", error=ErrorInfo.of(error), removed=True)
        self.scheduler.failed.clear()
        self.connections.flush()
        self.connections.beat(self.steps, self.scheduler.rows.running, len(self.scheduler.waiting))
        for peer in self.connections.lost:
            self._forget(peer)
        self.connections.lost.clear()

    # --- messages -------------------------------------------------------------------------------

    def _take_in(self, peer: Connection, message: EngineMessage) -> None:
        match message:
            case Submit():
                self._submit(peer, message)
            case Abort():
                for rid in message.rids:
                    request = peer.requests.get(rid)
                    if request is not None:
                        self._finish(request, "abort")
            case Release():
                for handle in message.handles:
                    peer.handles.release(handle)
            case Credit():
                peer.outbox.credits += message.steps
            case Ask():
                self._answer(peer, message)

    def _submit(self, peer: Connection, message: Submit) -> None:
        request = None
        try:
            if message.rid in peer.requests:
                raise RametError(f"request id {message.rid} is in use")
            request = request_of(message, peer.identity, peer.handles, self.runner.vocab_size)
            if request is None:
                self.connections.send(peer, NeedTokens(rid=message.rid))
                return
            self.scheduler.add(request)
        except RametError as error:
            peer.outbox.finish(
                Finish(
                    rid=message.rid,
                    reason="abort",
                    prompt_tokens=0 if request is None else request.prompt_len,
                    error=ErrorInfo.of(error),
                )
            )
            return
        peer.requests[message.rid] = request
        if message.sampling.stops:
            self._matchers[request.serial] = StopMatcher(message.sampling.stops)

    def _answer(self, peer: Connection, ask: Ask) -> None:
        data: dict[str, Any] = {}
        error = None
        match ask.op:
            case "hello":
                data = self.facts
            case "info":
                data = self.info()
            case "flush":
                if self.scheduler.idle and not self._flights:
                    data = {"freed": self.scheduler.memory.flush()}
                else:
                    error = ErrorInfo.of(RametError("the cache is in use: requests are running"))
            case "shutdown":
                self.stopping = True
        self.connections.send(peer, Answer(id=ask.id, data=data, error=error))

    def info(self) -> dict[str, Any]:
        """What operators ask for: who holds how much, who runs, what was reused."""
        usage = self.scheduler.memory.usage()
        return {
            "pages": {
                "total": usage.total,
                "free": usage.free,
                "cached": usage.evictable,
                "held": usage.held,
            },
            "requests": {
                "running": self.scheduler.rows.running,
                "waiting": len(self.scheduler.waiting),
            },
            "retracted": self.scheduler.num_retracted,
            "steps": self.steps,
            **self.totals,
        }

    def _forget(self, peer: Connection) -> None:
        """A gateway is gone: drop its work, release what it kept."""
        log.warning("a gateway is gone; dropping %d requests", len(peer.requests))
        for request in list(peer.requests.values()):
            self._matchers.pop(request.serial, None)
            self.scheduler.remove(request)
        peer.requests.clear()
        peer.handles.clear()
        self.connections.drop(peer)

    # --- samples --------------------------------------------------------------------------------

    def _hand_out(self, planned: Planned, result: StepResult) -> None:
        """Enter a step's samples, end what ends, tell the gateways."""
        self._send_prompt_logprobs(planned, result)
        rows = self.scheduler.rows
        alive = rows.epoch[planned.rows] == planned.epochs
        at = planned.rows[alive]
        tokens = result.tokens[alive]
        bad = result.bad[alive]
        known = rows.known[at]
        rows.tokens[at, known] = tokens
        rows.known[at] = known + 1
        made = known + 1 - rows.prompt_len[at]
        stopped = (rows.stop_ids[at] == tokens[:, None]).any(1) & (made > rows.min_new[at])
        full = made >= rows.max_new[at]
        self.totals["output_tokens"] += len(at)
        self._send_tokens(at, tokens, result, alive)
        for i in np.flatnonzero(bad | stopped | full | rows.stop_strings[at]).tolist():
            request = rows.requests[at[i]]
            assert request is not None
            if bad[i]:
                error = RametError("the model produced NaN logits for this request")
                # Its KV may hold NaNs too: a retry must not find it cached.
                self._finish(request, "abort", error=ErrorInfo.of(error), poisoned=True)
            elif stopped[i]:
                self._finish(request, "stop", matched=int(tokens[i]))
            elif rows.stop_strings[at[i]] and (
                hit := self._match(request, int(tokens[i]), int(made[i]))
            ):
                self._finish(request, "stop", matched=hit[0], text_bytes=hit[1])
            elif full[i]:
                self._finish(request, "length")
        for request in planned.ended:
            if request.row >= 0:
                self._finish(request, "length")

    def _match(self, request: Request, token: int, made: int) -> tuple[bytes, int] | None:
        hit = self._matchers[request.serial].push(self._token_bytes[token])
        return hit if made > request.sampling.min_new_tokens else None

    def _send_tokens(
        self, at: IntArray, tokens: IntArray, result: StepResult, alive: npt.NDArray[np.bool_]
    ) -> None:
        rows = self.scheduler.rows
        peers = [request.connection for row in at if (request := rows.requests[row]) is not None]
        logprobs = None if result.logprobs is None else result.logprobs[alive]
        for identity in set(peers):
            mine = np.fromiter((peer == identity for peer in peers), np.bool_, len(peers))
            peer = self.connections[identity]
            column = peer.outbox.tokens(
                rows.rid[at[mine]], tokens[mine], None if logprobs is None else logprobs[mine]
            )
            if result.top_ids is None or result.top_values is None:
                continue
            top_ids, top_values = result.top_ids[alive][mine], result.top_values[alive][mine]
            for i, wanted in enumerate(rows.top_logprobs[at[mine]].tolist()):
                if wanted:
                    peer.outbox.top(column + i, _top(top_ids[i, :wanted], top_values[i, :wanted]))

    def _send_prompt_logprobs(self, planned: Planned, result: StepResult) -> None:
        for (request, start), found in zip(planned.scored, result.prompt_logprobs):
            peer = self.connections.get(request.connection)
            if peer is None or peer.requests.get(request.rid) is not request:
                continue
            peer.outbox.prompt(
                PromptLogprobs(
                    rid=request.rid,
                    start=start,
                    values=found.values.astype("<f4").tobytes(),
                    top=_tops(found, request.sampling.top_logprobs),
                )
            )

    def _finish(
        self,
        request: Request,
        reason: Any,
        *,
        matched: bytes | int | None = None,
        text_bytes: int = -1,
        error: ErrorInfo | None = None,
        removed: bool = False,
        poisoned: bool = False,
    ) -> None:
        """End a request: give back its row and KV, keep its stream if wanted, tell its gateway."""
        self._matchers.pop(request.serial, None)
        node = None if removed else self.scheduler.remove(request, poisoned=poisoned)
        peer = self.connections[request.connection]
        peer.requests.pop(request.rid, None)
        cached = max(request.cached_tokens, 0)
        if request.keep is not None and reason != "abort":
            peer.handles.keep(request.keep, request.tokens, node)
        if reason == "abort" and error is None:
            error = ErrorInfo.of(AbortedError("the request was aborted"))
        else:
            self.totals["finished"] += 1
            self.totals["prompt_tokens"] += request.prompt_len
            self.totals["cache_hit_tokens"] += cached
        peer.outbox.finish(
            Finish(
                rid=request.rid,
                reason=reason,
                matched=matched,
                text_bytes=text_bytes,
                prompt_tokens=request.prompt_len,
                cached_tokens=cached,
                error=error,
            )
        )


def _top(ids: IntArray, values: npt.NDArray[np.float32]) -> TopLogprobs:
    return TopLogprobs(ids=ids.astype("<i4").tobytes(), values=values.astype("<f4").tobytes())


def _tops(found: PositionLogprobs, wanted: int) -> list[TopLogprobs]:
    if not wanted or found.top_ids is None or found.top_values is None:
        return []
    return [
        _top(ids[:wanted], values[:wanted]) for ids, values in zip(found.top_ids, found.top_values)
    ]
