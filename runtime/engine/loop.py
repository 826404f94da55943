"""The engine: messages in, steps, messages out. One step is `Engine.step`, on one screen."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from ..model.runner import Runner, Ticket
from ..protocol.errors import ErrorInfo, GrammarError, RametError
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
from ..scheduler.building import Planned
from ..scheduler.scheduler import MustDrain, Scheduler
from .connections import BEAT_SECONDS, Connection, Connections
from .departures import Departures
from .endings import Endings
from .guided import Guided
from .guides import Guides
from .look import emptied, look
from .outputs import Outputs
from .recorder import Recorder, Unrecorded
from .samples import Samples
from .submission import request_of
from .tally import Tally

log = logging.getLogger(__name__)

POLL_SECONDS = 0.002
"""How often an otherwise idle engine looks whether a grammar, or KV, is there."""
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
        self._endings = Endings(token_bytes)
        outputs = Outputs(connections, scheduler.rows)
        self._guided = guides and Guided(guides, scheduler, self._endings, outputs)
        self._tally = Tally()
        self._recorder = recorder or Unrecorded()
        self._departures = Departures(
            scheduler, connections, self._endings, guides, self._recorder, self._tally
        )
        self._samples = Samples(
            scheduler.rows, outputs, self._endings, self._guided, self._departures, self._tally
        )
        self.stopping = False
        self.steps = 0

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
            self._tally.launch(planned.batch.num_tokens)
            ticket = self.runner.launch(planned.batch)
            self._flights.append((planned, ticket))
            if len(planned.batch.masked):
                self._mask(planned, ticket)
            self.steps += 1
            if self.steps % CHECK_EVERY == 0:
                self.scheduler.assert_consistent()
        if self._flights and (planned is None or len(self._flights) > self._depth):
            self._land()
        for request, error in self.scheduler.failed:
            self._departures.fail(request, error, removed=True)
        self.scheduler.failed.clear()
        self.connections.flush()
        self.connections.beat(self.steps, self.scheduler.rows.running, self._waiting)
        for peer in self.connections.lost:
            self._departures.forget(peer)
        self.connections.lost.clear()

    def _land(self) -> None:
        """Hand out the samples of the oldest step under way."""
        landed, ticket = self._flights.popleft()
        result = ticket.result()
        self.scheduler.loading.computed(landed.batch, self._tally.landed())
        self._samples.take_in(landed, result)

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
                        self._departures.abort(request)
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
        except Exception as error:  # no fault of others, whatever it is
            peer.outbox.finish(
                Finish(
                    rid=message.rid,
                    reason="abort",
                    prompt_tokens=0 if request is None else request.prompt_len,
                    error=ErrorInfo.of(_told(error, message.rid)),
                )
            )
            return
        for handle, length in message.marks:
            prefix = request.tokens[:length]
            peer.handles.mark(handle, prefix, request.namespace, request.remaining, request.near)
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
                    data, error = emptied(self.scheduler.memory)
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
            "steps": self.steps,
            "tiers": self.scheduler.loading.facts(),
            **self._tally.facts(0 if self._guided is None else self._guided.forced_tokens),
        }

    # --- constrained output ---------------------------------------------------------------------

    def _bring_in(self, guided: Guided) -> None:
        """Queue requests whose grammar is there; end those that will never have one."""
        for request, outcome in guided.bring_in():
            self._departures.conclude(request, outcome)

    def _mask(self, planned: Planned, ticket: Ticket) -> None:
        """Say what a step may sample, while its forward runs. That depends on what the steps before
        it sampled."""
        assert self._guided is not None
        while len(self._flights) > 1:
            self._land()
        rows = self.runner.mask_rows(len(planned.batch.masked))
        began = time.perf_counter()
        of, failed = self._guided.guides.masks(planned, self.scheduler.rows, rows)
        self._tally.mask_seconds += time.perf_counter() - began
        ticket.mask(rows[: int(of.max()) + 1], of)
        for request, error in failed:
            self._departures.fail(request, error)


def _told(error: Exception, rid: int) -> RametError:
    """What is said of a request that could not begin. What is not said on purpose is logged."""
    if isinstance(error, RametError):
        return error
    log.error("request %d could not begin", rid, exc_info=error)
    return RametError(f"the engine could not begin it: {type(error).__name__}; its log says more")
