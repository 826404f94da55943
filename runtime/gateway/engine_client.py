"""The gateway's end of the connection to an engine."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from typing import Any, Literal

from ..protocol.codec import engine_codec, reply_codec
from ..protocol.errors import BackendError
from ..protocol.messages import (
    Abort,
    Answer,
    Ask,
    Beat,
    Credit,
    EngineMessage,
    EngineReply,
    EngineSampling,
    NeedTokens,
    Release,
    StepOut,
)
from ..protocol.trie import Trie
from .engine_line import EngineLine
from .observer import Observer
from .received import enter_step
from .request import EngineRequest, Handle, IntArray

log = logging.getLogger(__name__)

CREDITS = 64
HEARTBEAT_S = 10.0
"""libzmq's threads answer each other whatever the engine computes: not to answer is to be gone."""
RETURN_S = 600.0
"""What waits for an engine to come back waits no longer."""
SILENCE_S = 300.0
"""The engine's loop speaks between steps, and a step may be long where the machine is busy."""


class EngineClient:
    """Submits requests, collects what comes back, and notices when the engine is gone.

    Lives on one asyncio loop; make it inside that loop. All waiting requests fail at once when
    the connection closes, when the engine's process does not answer for ``heartbeat_s`` (frozen,
    or unreachable), or its loop says nothing for ``silence_s`` (stuck). With ``resubmit`` those of
    which nobody was told anything wait instead, and are submitted again (once) when the engine is
    back. When the engine (or another one at the same address) is back, requests are taken again;
    handles that it does not know are made good by sending whole prompts.

    After each step the loop stays awake for ``spin`` seconds, as `Patience` has it, or for as long
    as the engine itself would.
    """

    def __init__(
        self,
        address: str,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        silence_s: float = SILENCE_S,
        resubmit: bool = False,
        spin: float = 0.0,
    ) -> None:
        self._silence_s = silence_s
        self._resubmit = resubmit
        self._lost_rids: list[int] = []
        self._lost_at = 0.0
        self._requests: dict[int, EngineRequest] = {}
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._rids = itertools.count(1)
        self._handles = itertools.count(1)
        self._released: list[int] = []
        self._held: set[int] = set()
        self._used_credits = 0
        self._heard = time.monotonic()
        self._gone: str | None = None
        self._must_answer = False
        self._loop = asyncio.get_running_loop()
        self._looked_at = 0
        self._line = EngineLine(
            address,
            heartbeat_s=heartbeat_s,
            spin=spin,
            on_message=self._on_message,
            on_there=self._on_there,
            on_gone=self._on_gone,
        )
        self.address = address
        self.info: dict[str, Any] = {}
        self.observer = Observer()
        self._watch = self._loop.call_later(1.0, self._watch_silence)

    async def start(self, timeout_s: float = 300.0) -> dict[str, Any]:
        """Wait until the engine says hello; what it said is also kept as ``info``.

        Raises `BackendError` when it does not within ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        while not self.info:
            if time.monotonic() > deadline:
                raise BackendError(f"no engine answers at {self.address} after {timeout_s:g} s")
            await asyncio.sleep(0.005)
        return self.info

    @property
    def gone(self) -> str | None:
        """Why the engine cannot be reached now, or ``None``."""
        return self._gone

    @property
    def silent_s(self) -> float:
        """Seconds since the engine's loop last said anything."""
        return time.monotonic() - self._heard

    def new_handle(self) -> Handle:
        """A handle for a request to keep its sequence under."""
        number = next(self._handles)
        self._held.add(number)
        return Handle(number, self._release)

    def submit(
        self,
        prompt: IntArray,
        sampling: EngineSampling,
        *,
        base: Handle | None = None,
        base_len: int = 0,
        keep: Handle | None = None,
        namespace: bytes = b"",
        program: int = 0,
        remaining: int = 0,
        marks: tuple[tuple[int, int], ...] = (),
        streaming: bool = False,
        explain: bool = False,
        trie: Trie | None = None,
        then: EngineRequest | None = None,
    ) -> EngineRequest:
        """Send a request off, with what goes on where it ends. ``prompt`` is whole, also where it
        builds on ``base``.

        Raises `BackendError` when the engine is gone.
        """
        if self._gone is not None:
            raise BackendError(self._gone)
        request = EngineRequest(
            next(self._rids),
            prompt,
            sampling,
            base=base,
            base_len=base_len,
            keep=keep,
            namespace=namespace,
            program=program,
            remaining=remaining,
            marks=marks,
            streaming=streaming,
            explain=explain,
            trie=trie,
            then=then,
        )
        self._requests[request.rid] = request
        while then is not None:
            self._requests[then.rid] = then
            then = then.then
        self._send(request.submit())
        if self._looked_at == 1:
            self._send_alone()
        self.observer.began()
        return request

    def follower(self, own: IntArray, sampling: EngineSampling, **more: Any) -> EngineRequest:
        """A request that is to go on where another ends, behind tokens of its ``own``: to be
        submitted with that one, and claimed when it is known what it goes on from. ``more`` are
        fields of the request."""
        request = EngineRequest(next(self._rids), own, sampling, **more)
        request.claimed = False
        return request

    def claim(self, request: EngineRequest, prompt: IntArray, streaming: bool) -> None:
        """Somebody waits for a request that was sent with the one before; ``prompt`` is whole."""
        request.claimed, request.prompt = True, prompt
        request.streaming = streaming
        if streaming and request.tokens:
            request.wake()
        self.observer.began()

    def abort(self, request: EngineRequest) -> None:
        """Stop caring about a request, and have the engine stop it unless it has finished."""
        if self._requests.pop(request.rid, None) is not None:
            self._send(Abort(rids=[request.rid]))

    async def ask(
        self,
        op: Literal["flush", "info", "shutdown", "explain", "tree"],
        timeout_s: float = 60.0,
        **asked: Any,
    ) -> dict[str, Any]:
        """Ask for what is no generation; ``asked`` are more fields of `Ask`. Raises the engine's
        error; `BackendError` for silence."""
        if self._gone is not None:
            raise BackendError(self._gone)
        number = next(self._rids)
        answer = self._asked[number] = self._loop.create_future()
        self._send(Ask(id=number, op=op, **asked))
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            raise BackendError(f"the engine did not answer {op!r} in {timeout_s:g} s") from None
        finally:
            self._asked.pop(number, None)

    @property
    def in_flight(self) -> int:
        return len(self._requests)

    def close(self) -> None:
        """Idempotent. Waiting requests fail."""
        self._fail_all("the connection to the engine is closed")
        self._watch.cancel()
        self._line.close()

    # --- out ---

    def _send(self, message: EngineMessage) -> None:
        self._line.post(engine_codec.encode(message))

    def looks_at(self, messages: int) -> None:
        """So many messages of a client are looked at now; 0: no more. A request by itself is sent
        at once: several are better for the engine to see together."""
        self._looked_at = messages
        if not messages:
            self._send_alone()

    def _send_alone(self) -> None:
        if len(self._requests) <= 1:
            self._line.send_now()

    def _submit_whole(self, request: EngineRequest) -> None:
        """Again, without building on a handle. It must not mark what was released since: nobody
        would release it once more."""
        request.marks = tuple(mark for mark in request.marks if mark[0] in self._held)
        self._send(request.submit(whole=True))

    def _release(self, number: int) -> None:
        self._held.discard(number)
        if not self._released:
            self._loop.call_soon(self._send_released)
        self._released.append(number)

    def _send_released(self) -> None:
        handles, self._released = self._released, []
        self._send(Release(handles=handles))

    def _greet(self) -> None:
        """Open the connection: after connecting, and again after the engine was gone."""
        number = next(self._rids)
        answer = self._asked[number] = self._loop.create_future()
        answer.add_done_callback(self._on_hello)
        self._used_credits = 0
        self._send(Ask(id=number, op="hello"))
        self._send(Credit(steps=CREDITS))

    def _on_hello(self, answer: asyncio.Future[dict[str, Any]]) -> None:
        if answer.cancelled():
            return
        if (error := answer.exception()) is not None:
            if self._gone is None:
                log.error("the engine refused the connection: %s", error)
            return
        self.info = answer.result() or {"engine": self.address}
        self._line.may_spin(float(self.info.get("spin_seconds", 0.0)))
        self._take_lane()
        self._back()

    def _take_lane(self) -> None:
        if self._line.take_lane():
            self._used_credits = 0
            self._send(Credit(steps=CREDITS))

    # --- in ---

    def _on_there(self) -> None:
        self._heard = time.monotonic()
        self._greet()

    def _on_gone(self) -> None:
        """What a dead engine said before may be read after this: only an answer to what is asked
        from now on tells that there is one."""
        if self.info and self._gone is None:
            self._lost("the engine is gone: its connection closed")
            self._must_answer = True
            self._greet()  # where its lane alone has ended

    def _watch_silence(self) -> None:
        self._watch = self._loop.call_later(1.0, self._watch_silence)
        silent = time.monotonic() - self._heard
        if self.info and self._gone is None and silent > self._silence_s:
            # Nobody will read them: should the loop go on, it must not compute them for nothing.
            self._send(Abort(rids=list(self._requests)))
            self._lost(f"the engine is gone: nothing heard for {silent:.0f} s")
        elif self._gone is not None and time.monotonic() > self._lost_at + RETURN_S:
            self._fail_all(self._gone)

    def _lost(self, why: str) -> None:
        if not self.info or self._gone is not None:
            return
        log.error("%s", why)
        self._line.leave_lane()
        self._used_credits = 0
        self._gone = why
        self._lost_at = time.monotonic()
        self._lost_rids = list(self._requests)
        for request in [r for r in self._requests.values() if not r.claimed]:
            request.broken = True
            del self._requests[request.rid]
        kept = [r for r in self._requests.values() if self._resubmit and r.begin_anew()]
        for request in kept:
            del self._requests[request.rid]
        self._fail_all(why)
        for request in kept:  # by new numbers: who hears of the old ones hears of what is lost
            request.rid = next(self._rids)
            self._requests[request.rid] = request

    def _back(self) -> None:
        """The engine, or another in its place, takes requests again."""
        if self._gone is None:
            return
        self._gone = None
        self._must_answer = False
        self._take_lane()
        self.observer.restarted()
        if self._lost_rids:
            # A new one may find what was on its way to the old one.
            self._send(Abort(rids=self._lost_rids))
        if self._requests:
            log.info("submitting %d requests again", len(self._requests))
        for request in self._requests.values():
            self._submit_whole(request)

    def _fail_all(self, why: str) -> None:
        requests, self._requests = self._requests, {}
        for request in requests.values():
            request.end(None, BackendError(why))
        asked, self._asked = self._asked, {}
        for answer in asked.values():
            if not answer.done():
                answer.set_exception(BackendError(why))
                answer.exception()

    def _on_message(self, data: bytes) -> None:
        self._heard = time.monotonic()
        try:
            message: EngineReply = reply_codec.decode(data)
        except BackendError as error:
            log.error("from the engine: %s", error)
            return
        if isinstance(message, StepOut):
            self._line.heard()
            self._on_step(message)
        elif isinstance(message, Answer):
            self._on_answer(message)
        elif isinstance(message, NeedTokens):
            request = self._requests.get(message.rid)
            if request is not None and not request.claimed:
                request.break_off()
            elif request is not None:
                self._submit_whole(request)
        elif isinstance(message, Beat) and self.info and not self._must_answer:
            self._back()

    def _on_answer(self, message: Answer) -> None:
        answer = self._asked.pop(message.id, None)
        if answer is None or answer.done():
            return
        if message.error is not None:
            answer.set_exception(message.error.exception())
        else:
            answer.set_result(message.data)

    def _on_step(self, step: StepOut) -> None:
        self._used_credits += 1
        if self._used_credits >= CREDITS // 2:
            self._send(Credit(steps=self._used_credits))
            self._used_credits = 0
        gaps = enter_step(step, self._requests, self._heard)
        if gaps:
            self.observer.gaps(gaps)
