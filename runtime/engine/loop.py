"""The engine: messages in, steps, messages out. One step is `Engine.step`, on one screen."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..model.runner import Runner, Ticket
from ..protocol.errors import AbortedError, ErrorInfo, GrammarError, RametError
from ..protocol.messages import (
    Abort,
    Answer,
    Ask,
    Credit,
    EngineMessage,
    Finish,
    NeedTokens,
    Release,
    Submit,
)
from ..scheduler.batch import StepResult
from ..scheduler.building import Planned
from ..scheduler.request import Request
from ..scheduler.scheduler import MustDrain, Scheduler
from .connections import BEAT_SECONDS, Connection, Connections
from .endings import Ending, Endings
from .guided import Guided, Outcome
from .guides import Guides
from .look import look
from .outputs import Outputs
from .recorder import Recorder, Unrecorded
from .submission import request_of
from .timing import Timing, spans_of

log = logging.getLogger(__name__)

POLL_SECONDS = 0.002
"""How often an otherwise idle engine looks whether a grammar, or KV, is there."""
NAN_LOGITS = "the model produced NaN logits for this request"
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
        guides: Guides | None = None,
        overlap: bool = True,
        recorder: Recorder | None = None,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.connections = connections
        self.facts = facts or {}
        self._depth = 1 if overlap and runner.asynchronous else 0
        self._flights: deque[tuple[Planned, Ticket]] = deque()
        self._outputs = Outputs(connections, scheduler.rows)
        self._endings = Endings(token_bytes)
        self._guided = guides and Guided(guides, scheduler, self._endings, self._outputs)
        self._timing = Timing()
        self._recorder = recorder or Unrecorded()
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
            self._recorder.close()
        if self._guided is not None:
            self._guided.guides.close()
        self.scheduler.loading.close()
        self.runner.close()

    def stop(self) -> None:
        """End after the step that runs. Safe in a signal handler."""
        self.stopping = True

    def step(self) -> None:
        """Take in messages, launch one step, hand out the samples of the one before."""
        for peer, message in self.connections.receive(self._patience()):
            self._take_in(peer, message)
        if self._guided is not None and self._guided.guides.waiting:
            self._bring_in(self._guided)
        try:
            planned = self.scheduler.plan(drained=not self._flights)
        except MustDrain:
            planned = None
        if planned is not None:
            self._timing.step(planned.batch.num_tokens)
            ticket = self.runner.launch(planned.batch)
            self._flights.append((planned, ticket))
            if len(planned.batch.masked):
                self._mask(planned, ticket)
            self.totals["computed_tokens"] += planned.batch.num_tokens
            self.steps += 1
            if self.steps % CHECK_EVERY == 0:
                self.scheduler.assert_consistent()
        if self._flights and (planned is None or len(self._flights) > self._depth):
            self._land()
        for request, error in self.scheduler.failed:
            self._finish(request, "abort", error=ErrorInfo.of(error), removed=True)
        self.scheduler.failed.clear()
        self.connections.flush()
        self.connections.beat(self.steps, self.scheduler.rows.running, self._waiting)
        for peer in self.connections.lost:
            self._forget(peer)
        self.connections.lost.clear()

    def _land(self) -> None:
        """Hand out the samples of the oldest step under way."""
        landed, ticket = self._flights.popleft()
        result = ticket.result()
        self.scheduler.loading.computed(landed.batch, self._timing.landed())
        self._hand_out(landed, result)

    @property
    def _waiting(self) -> int:
        scheduler = self.scheduler
        return len(scheduler.waiting) + len(scheduler.aside) + len(scheduler.loading)

    def _patience(self) -> float:
        """How long the next message may be waited for: not at all while there is work."""
        if self._flights or self.scheduler.waiting or self.scheduler.rows.running:
            return 0.0
        self.scheduler.loading.rest()
        compiling = self._guided is not None and self._guided.guides.waiting
        return POLL_SECONDS if compiling or self.scheduler.loading.busy else BEAT_SECONDS

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
            if message.sampling.constraint is None and not message.sampling.heal:
                self.scheduler.add(request)
            elif self._guided is None:
                raise GrammarError("this engine has no grammar backend")
            else:
                self._guided.start(request)
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
        for handle, length in message.marks:
            peer.handles.mark(handle, request.tokens[:length], request.namespace, request.remaining)
        peer.requests[message.rid] = request
        self._endings.watch(request)

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
                    self.scheduler.loading.flush()
                    data = {"freed": self.scheduler.memory.flush()}
                else:
                    error = ErrorInfo.of(RametError("the cache is in use: requests are running"))
            case "explain" | "tree":
                data, error = look(self.scheduler.memory, ask)
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
                "waiting": self._waiting,
            },
            "retracted": self.scheduler.num_retracted,
            "step_tokens": self._timing.step_tokens(),
            "mask_seconds": self._timing.mask_seconds,
            "steps": self.steps,
            "tiers": self.scheduler.loading.facts(),
            **self.totals,
            "output_tokens": self.totals["output_tokens"] + self._forced_tokens,
            "forced_tokens": self._forced_tokens,
        }

    @property
    def _forced_tokens(self) -> int:
        return 0 if self._guided is None else self._guided.forced_tokens

    def _forget(self, peer: Connection) -> None:
        """A gateway is gone: drop its work, release what it kept."""
        log.warning("a gateway is gone; dropping %d requests", len(peer.requests))
        for request in list(peer.requests.values()):
            self._forget_output(request)
            self.scheduler.remove(request)
        peer.requests.clear()
        peer.handles.clear()
        self.connections.drop(peer)

    # --- samples --------------------------------------------------------------------------------

    def _hand_out(self, planned: Planned, result: StepResult) -> None:
        """Enter a step's samples, end what ends, tell the gateways."""
        self._outputs.prompt_logprobs(planned, result)
        for request in self._outputs.tries(planned, result):
            error = ErrorInfo.of(RametError(NAN_LOGITS))
            self._finish(request, "abort", error=error, poisoned=True)
        rows = self.scheduler.rows
        alive = rows.epoch[planned.rows] == planned.epochs
        at, tokens, bad = planned.rows[alive], result.tokens[alive], result.bad[alive]
        known = rows.known[at]
        rows.tokens[at, known] = tokens
        rows.known[at] = known + 1
        made = known + 1 - rows.prompt_len[at]
        stopped = (rows.stop_ids[at] == tokens[:, None]).any(1) & (made > rows.min_new[at])
        full = made >= rows.max_new[at]
        self.totals["output_tokens"] += len(at)
        self._timing.sampled(rows, at)
        self._outputs.tokens(at, tokens, result, alive)
        if self._guided is not None:
            self._guided.ahead(at, tokens, bad)
        watched = rows.stop_strings[at] | rows.masked[at]
        for i in np.flatnonzero(bad | stopped | full | watched).tolist():
            request = rows.requests[at[i]]
            assert request is not None
            if bad[i]:
                error = RametError(
                    "no token that the request allows is left" if rows.masked[at[i]] else NAN_LOGITS
                )
                # Its KV may hold NaNs too: a retry must not find it cached.
                self._finish(request, "abort", error=ErrorInfo.of(error), poisoned=True)
            elif rows.healing[at[i]]:
                self._heal(request, int(tokens[i]))
            elif stopped[i]:
                self._finish(request, "stop", matched=int(tokens[i]))
            elif rows.stop_strings[at[i]] and (
                ending := self._endings.stop_string(request, int(tokens[i]), int(made[i]))
            ):
                self._end(request, ending)
            elif rows.masked[at[i]]:
                self._follow(request, int(tokens[i]))
            elif full[i]:
                self._finish(request, "length")
        for request in planned.ended:
            if request.row >= 0:
                self._finish(request, "length")

    # --- constrained output ---------------------------------------------------------------------

    def _bring_in(self, guided: Guided) -> None:
        """Queue requests whose grammar is there; end those that will never have one."""
        for request, outcome in guided.bring_in():
            self._conclude(request, outcome)

    def _mask(self, planned: Planned, ticket: Ticket) -> None:
        """Say what a step may sample, while its forward runs. That depends on what the steps before
        it sampled."""
        assert self._guided is not None
        while len(self._flights) > 1:
            self._land()
        rows = self.runner.mask_rows(len(planned.batch.masked))
        began = time.perf_counter()
        failed = self._guided.guides.masks(planned, self.scheduler.rows, rows)
        self._timing.mask_seconds += time.perf_counter() - began
        ticket.mask(rows)
        for request, error in failed:
            self._conclude(request, error)

    def _follow(self, request: Request, token: int) -> None:
        assert self._guided is not None
        self._conclude(request, self._guided.follow(request, token))

    def _heal(self, request: Request, token: int) -> None:
        assert self._guided is not None
        self._conclude(request, self._guided.heal(request, token))

    def _conclude(self, request: Request, outcome: Outcome) -> None:
        if isinstance(outcome, RametError):
            self._finish(request, "abort", error=ErrorInfo.of(outcome))
        elif outcome is not None:
            self._end(request, outcome)

    # --- ends -----------------------------------------------------------------------------------

    def _end(self, request: Request, ending: Ending) -> None:
        self._finish(request, ending.reason, matched=ending.matched, text_bytes=ending.text_bytes)

    def _forget_output(self, request: Request) -> None:
        self._endings.forget(request)
        if self._guided is not None:
            self._guided.guides.forget(request)

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
        self._forget_output(request)
        node = None if removed else self.scheduler.remove(request, poisoned=poisoned)
        peer = self.connections[request.connection]
        peer.requests.pop(request.rid, None)
        cached = max(request.cached_tokens, 0)
        spans = spans_of(request)
        if request.keep is not None and reason != "abort":
            tokens = request.tokens[: request.line]
            peer.handles.keep(request.keep, tokens, node, request.namespace, request.remaining)
        for handle in request.marks:
            peer.handles.renew(handle, request.remaining)
        self._recorder.ended(request, counted=reason != "abort" or error is not None)
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
                forced_tokens=request.forced_tokens,
                error=error,
                grammar_s=spans.grammar,
                queue_s=spans.queue,
                prefill_s=spans.prefill,
                decode_s=spans.decode,
                divergence=request.divergence,
            )
        )
