"""Requests that wait, counted as they come and go; and which may not even join them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import SupportsIndex

import msgspec

from ..memory.kv_memory import KVMemory
from ..protocol.errors import BadInputError, ContextLengthError, QueueFullError
from .classes import DEFAULT_CLASS, PriorityClass
from .request import Request

Program = tuple[bytes, int]


class Waiting(list[Request]):
    """A queue that knows how many prompt tokens it holds, and what of each class, and wishes that
    what its requests will read stay in ``memory``. Requests come by `append`, `insert` and `place`,
    and go by `remove`, no other way."""

    def __init__(self, memory: KVMemory | None = None) -> None:
        super().__init__()
        self._tree = memory.tree if memory is not None and memory.looks_ahead else None
        self.tokens = 0
        self.count_of: Counter[str] = Counter()
        self.tokens_of: Counter[str] = Counter()
        self._levels: Counter[int] = Counter()
        self.by_program: dict[Program, list[Request]] = {}

    @property
    def most_urgent(self) -> int:
        """The lowest level of all that wait. Somebody does."""
        return min(self._levels)

    def append(self, item: Request, /) -> None:
        super().append(item)
        self._count(item, 1)

    def insert(self, index: SupportsIndex, item: Request, /) -> None:
        super().insert(index, item)
        self._count(item, 1)

    def place(self, request: Request) -> None:
        """Insert a request that stood elsewhere for a while where its arrival puts it."""
        at = len(self)
        while at and self[at - 1].arrival > request.arrival and not self[at - 1].retractions:
            at -= 1
        self.insert(at, request)

    def remove(self, item: Request, /) -> None:
        super().remove(item)
        self._count(item, -1)

    def _count(self, request: Request, sign: int) -> None:
        self.tokens += sign * request.given
        self.count_of[request.cls] += sign
        self.tokens_of[request.cls] += sign * request.given
        self._levels[request.level] += sign
        if not self._levels[request.level]:
            del self._levels[request.level]
        program = program_of(request)
        if sign > 0:
            self.by_program.setdefault(program, []).append(request)
        else:
            group = self.by_program[program]
            group.remove(request)
            if not group:
                del self.by_program[program]
        if self._tree is not None and sign > 0:
            prompt = request.tokens[: request.reusable]
            request.wish = self._tree.at(prompt, request.namespace, request.near)
            request.near = request.wish
            self._tree.pin(request.wish, awaited=True)
        elif self._tree is not None and request.wish is not None:
            self._tree.unpin(request.wish, awaited=True)
            request.wish = None


def program_of(request: Request) -> Program:
    """What tells a request's program from others; one of none is one by itself."""
    return request.connection, request.program or -1 - request.rid


def cached(request: Request, memory: KVMemory, most: int | None = None) -> int:
    """How many of its leading tokens (of ``most``, if not of all) are cached."""
    tokens = request.tokens if most is None else request.tokens[:most]
    request.near, length = memory.reach(tokens, request.namespace, request.near)
    return length


def check_fits(request: Request, context_length: int, total: int) -> None:
    """Raises `ContextLengthError` for a request that can never run in a context and a KV memory of
    so many tokens."""
    room = min(context_length, total)
    if request.prompt_len < 1 and request.trie is None:
        raise ContextLengthError("the prompt is empty", param="prompt")
    if request.trie is not None and len(request.tokens) > room:
        raise ContextLengthError(
            f"the prompt has {request.prompt_len} tokens, and its continuations"
            f" {len(request.trie.nodes)} that must be there at the same time; "
            + (
                f"the context holds {room}"
                if room == context_length
                else f"KV memory holds {room} (max_total_tokens)"
            ),
            param="prompt",
        )
    new = request.sampling.max_new_tokens
    if request.prompt_len + min(new, 1) > room:
        raise ContextLengthError(
            f"the prompt has {request.prompt_len} tokens; "
            + (
                f"the context holds {room}"
                if room == context_length
                else f"KV memory holds {room} (max_total_tokens)"
            ),
            param="prompt",
        )
    if request.prompt_len + new > context_length:
        raise ContextLengthError(
            f"{request.prompt_len} prompt tokens and {new} new ones exceed the context of "
            f"{context_length}",
            param="max_new_tokens",
        )


def memory_full(total: int, used: int) -> ContextLengthError:
    """Of a request that runs alone and cannot go on."""
    return ContextLengthError(
        f"KV memory of {total} tokens is full at {used} tokens of this request alone; raise "
        "max_total_tokens or ask for fewer tokens",
        param="max_new_tokens",
    )


def classify(request: Request, classes: Mapping[str, PriorityClass]) -> PriorityClass:
    """Give a request its class and level; an answer beyond the class's context is shortened.

    Raises `BadInputError` for an unknown class, `ContextLengthError` for a prompt beyond its
    context.
    """
    request.cls = request.cls or DEFAULT_CLASS
    cls = classes.get(request.cls)
    if cls is None:
        known = ", ".join(sorted(classes))
        raise BadInputError(f"priority: no class {request.cls!r}; there are {known}",
                            param="priority")  # fmt: skip
    request.level = cls.priority + request.priority
    if cls.context_length is not None:
        new = request.sampling.max_new_tokens
        room = cls.context_length - request.prompt_len
        if request.trie is not None:
            room -= request.trie.height
        if room < min(new, 1):
            more = "" if request.trie is None else f" and a continuation {request.trie.height}"
            raise ContextLengthError(
                f"the prompt has {request.prompt_len} tokens{more}; "
                f"the context of class {request.cls} "
                f"holds {cls.context_length}",
                param="prompt",
            )
        if new > room:
            shorter = msgspec.structs.replace(
                request.sampling,
                max_new_tokens=room,
                min_new_tokens=min(request.sampling.min_new_tokens, room),
            )
            request.sampling = shorter
    return cls


def check_queue(
    request: Request, cls: PriorityClass, queues: tuple[Waiting, ...], requests: int, tokens: int
) -> None:
    """Raises `QueueFullError` when the queues hold as many ``requests`` or ``tokens`` as they may,
    or as many as the request's class may. A prompt larger than all that may wait is let into an
    empty queue: another time it would not fit either."""
    waiting = sum(map(len, queues))
    if waiting >= requests:
        raise QueueFullError(f"the queue is full ({requests} requests)")
    queued = sum(queue.tokens for queue in queues)
    if queued and queued + request.given > tokens:
        raise QueueFullError(f"the queue is full ({tokens} prompt tokens)")
    name, most = request.cls, cls.max_queued
    if most is not None and sum(queue.count_of[name] for queue in queues) >= most:
        raise QueueFullError(f"the queue of class {name} is full ({most} requests)")
    most = cls.max_queued_tokens
    queued = sum(queue.tokens_of[name] for queue in queues)
    if most is not None and queued and queued + request.given > most:
        raise QueueFullError(f"the queue of class {name} is full ({most} prompt tokens)")
