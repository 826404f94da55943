"""One stream while it runs: its queue, its context in the executor, and the text it has grown."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from ..protocol.errors import ErrorInfo, ProgramError
from .cell import Cell
from .executor import Context
from .taken import Taken


class Stream:
    """Owned by the interpreter. ``context`` is there from when the stream starts until it ends."""

    __slots__ = (
        "_closed",
        "_pieces",
        "_role_start",
        "_scopes",
        "_wake",
        "context",
        "error",
        "finished",
        "inherited",
        "length",
        "messages",
        "number",
        "queue",
        "role",
        "started",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.context: Context | None = None
        self.queue: deque[Taken] = deque()
        self.finished = Cell()
        self.error: ErrorInfo | None = None
        self.messages: list[dict[str, str]] = []
        self.role: str | None = None
        self.started = False
        self.length = 0
        self.inherited = 0
        self._pieces: list[str] = []
        self._scopes: list[tuple[str, int]] = []
        self._role_start = 0
        self._closed = False
        self._wake: asyncio.Future[None] | None = None

    # --- instructions in ---

    def put(self, taken: Taken) -> None:
        self.queue.append(taken)
        self._rouse()

    def put_first(self, taken: Sequence[Taken]) -> None:
        """Before all that is there. For what the stream itself does as it runs."""
        self.queue.extendleft(reversed(taken))

    def close(self) -> None:
        """Nothing more will be put in."""
        self._closed = True
        self._rouse()

    @property
    def open(self) -> bool:
        """Whether more may be put in."""
        return not self._closed

    async def next(self) -> Taken | None:
        """The next instruction, or ``None`` when there will be none."""
        while not self.queue:
            if self._closed:
                return None
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
            self._wake = None
        return self.queue.popleft()

    def _rouse(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    # --- what it has grown ---

    def add(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self.length += len(text)

    def text(self, start: int = 0) -> str:
        """The text from character ``start`` on."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        whole = self._pieces[0] if self._pieces else ""
        return whole[start:] if start else whole

    def new_text(self) -> str:
        """What came since the fork that made this stream."""
        return self.text(self.inherited)

    def begin_role(self, role: str) -> None:
        self.role = role
        self._role_start = self.length

    def end_role(self) -> None:
        """To be called before the closing marker is added."""
        if self.role is not None:
            self.messages.append({"role": self.role, "content": self.text(self._role_start)})
            self.role = None

    def begin_scope(self, name: str) -> None:
        self._scopes.append((name, self.length))

    def end_scope(self) -> str:
        if not self._scopes:
            raise ProgramError("no variable scope is open")
        return self.text(self._scopes.pop()[1])

    def start_child(self, child: Stream) -> None:
        """Give the child all that this stream has, its context included."""
        assert self.context is not None
        child.context = self.context.fork()
        text = self.text()
        child._pieces = [text] if text else []
        child.length = child.inherited = self.length
        child.messages = [*self.messages]
        child.role = self.role
        child._role_start = self._role_start
