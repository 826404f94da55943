"""Programs interpreted in this process, over an `Executor`."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

from ramet.runtime.program.executor import Executor
from ramet.runtime.program.instructions import Instruction
from ramet.runtime.protocol import ErrorInfo, RametError

from . import _loop
from .base import Backend, Opening, Session


class LocalBackend(Backend):
    """Base of backends that bring an executor; the interpreter is the runtime's own."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._numbers = itertools.count(1)

    def open(self, opening: Opening) -> Session:
        return LocalSession(self.executor, next(self._numbers), opening)


class LocalSession(Session):
    """Runs the interpreter as a task of the IO loop."""

    def __init__(self, executor: Executor, number: int, opening: Opening) -> None:
        super().__init__()
        self._executor = executor
        self._number = number
        self._opening = opening
        self._interpreter: Any = None
        self._task: asyncio.Task[None] | None = None

    def send(self, instructions: Sequence[Instruction], closed: bool) -> None:
        registered = self._opening.registered
        if registered is not None:
            instructions = registered.instructions
        _loop.soon(self._feed, tuple(instructions), closed)

    def cancel(self) -> None:
        _loop.soon(self._cancel)

    def _feed(self, instructions: tuple[Instruction, ...], closed: bool) -> None:
        if self.store.done:
            return
        try:
            if self._interpreter is None:
                self._start()
            interpreter: Any = self._interpreter
            interpreter.feed(instructions, closed)
        except RametError as error:
            self.store.fail(ErrorInfo.of(error))
            self._cancel()

    def _start(self) -> None:
        from ramet.runtime.program.interpreter import Interpreter
        from ramet.runtime.program.limits import Limits

        opening = self._opening
        self._interpreter = Interpreter(
            self._executor,
            self.store.feed,
            program=self._number,
            sampling=opening.sampling,
            args=opening.args,
            stream=opening.stream,
            limits=Limits(),
            cache_salt=opening.cache_salt,
        )
        self._task = asyncio.get_running_loop().create_task(self._interpreter.run())
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.store.fail(ErrorInfo.of(error))
        elif not self.store.done:
            self.store.fail(ErrorInfo("backend", "the interpreter ended early"))

    def _cancel(self) -> None:
        if self._interpreter is not None:
            self._interpreter.cancel()
