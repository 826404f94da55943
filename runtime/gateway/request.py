"""One request in the engine, as the gateway sees it: what it asked and what has come back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ..protocol.errors import RametError
from ..protocol.messages import EngineSampling, Finish, PromptLogprobs, Submit, TopLogprobs
from ..protocol.trie import Trie
from . import origin

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


def joined(ids: IntArray, more: Sequence[int]) -> IntArray:
    """``ids`` and then ``more``; neither is changed."""
    return np.concatenate([ids, np.asarray(more, np.int32)]) if len(more) else ids


class Handle:
    """A sequence that the engine keeps for streams that go on from it, counted here.

    Whoever makes or acquires one releases it once; the last one tells the engine.
    """

    __slots__ = ("_count", "_on_last", "number")

    def __init__(self, number: int, on_last: Callable[[int], None]) -> None:
        self.number = number
        self._count = 1
        self._on_last = on_last

    def acquire(self) -> Handle:
        assert self._count > 0
        self._count += 1
        return self

    def release(self) -> None:
        assert self._count > 0
        self._count -= 1
        if self._count == 0:
            self._on_last(self.number)


class EngineRequest:
    """Filled by the client's receiving side; one waiter awaits `news`.

    ``streaming`` wakes the waiter at every step, otherwise only the end does. Of a request with a
    ``trie``, ``prompt_logprobs`` are those of its nodes, counted by their parents.
    """

    __slots__ = (
        "_fresh",
        "_waiter",
        "again",
        "base",
        "base_len",
        "broken",
        "claimed",
        "error",
        "explain",
        "finish",
        "first_token_at",
        "keep",
        "last_token_at",
        "logprobs",
        "marks",
        "namespace",
        "origin",
        "program",
        "prompt",
        "prompt_logprobs",
        "prompt_tops",
        "remaining",
        "rid",
        "sampling",
        "since",
        "streaming",
        "then",
        "tokens",
        "tops",
        "trie",
    )

    def __init__(
        self,
        rid: int,
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
    ) -> None:
        self.rid = rid
        self.prompt = prompt
        self.sampling = sampling
        self.base = base
        self.base_len = base_len if base is not None else 0
        self.keep = keep
        self.namespace = namespace
        self.origin = origin.current()
        self.program = program
        self.remaining = remaining
        self.marks = marks
        self.streaming = streaming
        self.explain = explain
        self.trie = trie
        self.then = then
        """What goes on where this one ends. Until somebody claims it, its prompt is what comes
        between the two."""
        self.claimed = True
        self.broken = False
        """Whether the engine will not go on to it."""
        self.since = 0.0
        """When the one before it ended, on the monotonic clock; 0: there was none, or not yet."""
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.tops: list[TopLogprobs | None] = []
        self.prompt_logprobs: FloatArray | None = None
        self.prompt_tops: dict[int, TopLogprobs] = {}
        self.finish: Finish | None = None
        self.error: RametError | None = None
        self.first_token_at: float | None = None
        self.last_token_at = 0.0
        self.again = False
        """Whether it was submitted before, to an engine that is gone."""
        self._fresh = False
        self._waiter: asyncio.Future[None] | None = None

    def submit(self, whole: bool = False) -> Submit:
        """The message that asks for it; ``whole``: without building on a handle."""
        build = self.base is not None and not whole
        ids = self.prompt[self.base_len :] if build else self.prompt
        return Submit(
            rid=self.rid,
            ids=ids.tobytes(),
            sampling=self.sampling,
            base=self.base.number if build and self.base is not None else None,
            base_len=self.base_len if build else 0,
            keep=self.keep.number if self.keep is not None else None,
            namespace=self.namespace,
            program=self.program,
            remaining=self.remaining,
            marks=self.marks,
            priority=self.origin.priority,
            cls=self.origin.cls,
            explain=self.explain,
            trie=self.trie,
            then=self._then(),
        )

    def _then(self) -> Submit | None:
        then = self.then
        return None if then is None or then.claimed or then.broken else then.submit()

    def break_off(self) -> None:
        """The engine will not go on to this one, nor to what comes after it."""
        at: EngineRequest | None = self
        while at is not None:
            at.broken = True
            at = at.then

    def add_prompt_logprobs(self, piece: PromptLogprobs) -> None:
        """Pieces go where they belong, so one that comes again does no harm."""
        if self.prompt_logprobs is None:
            size = len(self.prompt) if self.trie is None else len(self.trie.tokens) // 4
            self.prompt_logprobs = np.full(size, np.nan, np.float32)
        room = len(self.prompt_logprobs) - piece.start
        values = np.frombuffer(piece.values, np.float32)[:room]
        self.prompt_logprobs[piece.start : piece.start + len(values)] = values
        for offset, top in enumerate(piece.top):
            self.prompt_tops[piece.start + offset] = top

    def begin_anew(self) -> bool:
        """Forget what has come, so that it can be submitted again. False, and nothing forgotten,
        when somebody was told of it, or it is not the first time."""
        if self.again or (self.streaming and self.tokens):
            return False
        self.again = True
        for kept in (self.tokens, self.logprobs, self.tops, self.prompt_tops):
            kept.clear()
        self.prompt_logprobs = None
        self.first_token_at = None
        return True

    def wake(self) -> None:
        """Something has come."""
        self._fresh = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def end(self, finish: Finish | None, error: RametError | None) -> None:
        """It is over, in one way or the other."""
        self.finish = finish
        self.error = error
        self.wake()

    async def news(self) -> bool:
        """Wait for something new; True: it has finished. Raises the error with which it failed."""
        if not self._fresh:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        self._fresh = False
        if self.error is not None:
            raise self.error
        return self.finish is not None
