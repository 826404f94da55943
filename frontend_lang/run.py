"""One run of a program: what was recorded goes to a session, and values come back from it."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ramet.runtime.program.events import Synced, Value
from ramet.runtime.program.instructions import Gen, Instruction, Select
from ramet.runtime.protocol import (
    AbortedError,
    BackendError,
    BadInputError,
    ErrorInfo,
    MetaInfo,
    ProgramError,
    RametError,
)

from .backends import _loop
from .backends.base import Backend, Opening, Session
from .branch import Binding, Branch, Gathered, Given, Made
from .recording import Recording, missing
from .source import here
from .symbols import SymbolRef, is_plain, pieces

FLUSH_SECONDS = 0.001
"""How long the first unsent generation waits for more of the program to go with it."""

T = TypeVar("T")


class Run(Recording):
    """A recording that is sent as it grows, in as few messages as Python's questions allow.

    Instructions wait until a value is needed, the function ends, or `FLUSH_SECONDS` have passed
    since the first unsent generation. ``failure`` is what the function itself raised.
    """

    def __init__(self, backend: Backend, opening: Opening, timeout: float | None = None) -> None:
        super().__init__()
        _check(timeout, opening.cache_salt)
        self.backend = backend
        self.opening = opening
        self.stream = opening.stream
        self.session: Session = backend.open(opening)
        self.store = self.session.store
        self.failure: BaseException | None = None
        self.returned: Any = None
        self.failed_by_runtime = False
        """Whether that was an error of the runtime, read inside the function."""
        self.expired = False
        self.driver: int | None = None
        """The thread that runs the function."""
        self._unsent: list[Instruction] = []
        self._sent = False
        self._armed = False
        self._timer: asyncio.TimerHandle | None = None
        if timeout is not None:
            _loop.soon(self._set_timer, timeout)

    # --- sending ----------------------------------------------------------------------------------

    def emit(self, instruction: Instruction) -> None:
        if self.store.fatal is not None:
            raise self.store.fatal.exception()
        self._unsent.append(instruction)
        if not self._armed and isinstance(instruction, (Gen, Select)):
            self._armed = True
            _loop.soon(self._arm)
        if self.stream:
            self.store.touch()

    def flush(self) -> None:
        """Send what is unsent."""
        with self.lock:
            if self._unsent:
                unsent, self._unsent = self._unsent, []
                self._sent = True
                self.session.send(unsent, False)

    def finish(self) -> None:
        """The function has returned: send the rest; nothing more will come."""
        with self.lock:
            if self.closed or self.store.done:
                self.closed = True
                self.store.touch()
                return
            for branch in list(self.branches):
                if not branch.ended:
                    self.final(branch)
            self.closed = True
            unsent, self._unsent = self._unsent, []
            self._sent = True
            self.session.send(unsent, True)
        self.store.touch()

    def abort(self, error: ErrorInfo | None = None) -> None:
        """Drop what is unsent, cancel what was sent. Whoever waits gets ``error``."""
        with self.lock:
            self._unsent.clear()
            self.closed = True
            if self._sent and not self.store.done:
                self.session.cancel()
        self.store.fail(error or ErrorInfo.of(AbortedError("the program was cancelled")))

    def fail(self, failure: BaseException) -> None:
        """The function raised: as `abort`, and readers learn of it."""
        self.failed_by_runtime = isinstance(failure, RametError) and bool(
            self.store.failures or self.store.fatal
        )
        self.failure = failure
        if isinstance(failure, RametError):
            self.abort(ErrorInfo.of(failure))
        else:
            what = f"{type(failure).__name__}: {failure}"
            self.abort(ErrorInfo.of(AbortedError(f"the program's function raised {what}")))

    def _arm(self) -> None:
        asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._flush_armed)

    def _flush_armed(self) -> None:
        with self.lock:
            self._armed = False
            try:
                self.flush()
            except RametError as error:  # nobody here to raise it to
                self.abort(ErrorInfo.of(error))

    def _set_timer(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expire, seconds)

    def _expire(self, seconds: float) -> None:
        if not self.store.done:
            self.expired = True
            message = f"the program did not finish within {seconds:g} s"
            self.abort(ErrorInfo.of(BackendError(message)))

    # --- waiting ----------------------------------------------------------------------------------

    def wait(self, check: Callable[[], T | None], timeout: float | None = None) -> T:
        """Send what is unsent, then wait until ``check`` has something. What the function raised
        is raised here as it is."""
        if _loop.in_io_thread():
            raise BackendError("a program's value cannot be waited for in ramet's own thread")
        self.flush()
        try:
            return self.store.wait(check, timeout)
        except AbortedError:
            if self.failure is None:
                raise
        raise self.failure

    async def wait_async(self, check: Callable[[], T | None]) -> T:
        """As `wait`, for asyncio."""
        self.flush()
        try:
            return await self.store.wait_async(check)
        except AbortedError:
            if self.failure is None:
                raise
        raise self.failure

    def wait_for_function(self, name: str | None = None, branch: Branch | None = None) -> None:
        """With ``stream``, a reader outside of the function waits until it has returned, or until
        it has appended what makes ``name``."""
        if not self.stream or self.closed or self.driver == threading.get_ident():
            return
        names = branch.names if branch is not None else ()
        self.wait(lambda: True if self.closed or name in names else None)

    def over(self) -> bool | None:
        """True when nothing more will come (a check for `wait`)."""
        return True if self.store.done else None

    def settle(self) -> None:
        """Wait for the end; raise where it came by the run's time-out."""
        self.store.wait(self.over)
        self._settled()

    async def settle_async(self) -> None:
        """As `settle`, for asyncio."""
        await self.store.wait_async(self.over)
        self._settled()

    def stop_timer(self) -> None:
        """The run is over: its time-out no longer matters."""
        if self._timer is not None:
            _loop.soon(self._timer.cancel)

    def _settled(self) -> None:
        self.stop_timer()
        if self.expired and self.store.fatal is not None:
            raise self.store.fatal.exception()

    # --- reading ----------------------------------------------------------------------------------

    def made(self, binding: Made, timeout: float | None = None) -> Value:
        """The value of an instruction, waited for. Raises `MissingValueError` where none of the
        arms that would have bound it was taken."""
        value = self.wait(self.pending(binding), timeout)
        if value.value is None:
            raise missing(binding.branch, binding.name, but=binding.name)
        return value

    def pending(self, binding: Made) -> Callable[[], Value | None]:
        """A check for `wait`: the value of an instruction."""
        lineage = binding.branch.lineage(binding.op)
        name = binding.name or None
        return lambda: self.store.value(binding.op, name, lineage)

    def reply(self, branch: Branch, op: int) -> Synced:
        """The answer to a `Sync` of a branch, waited for."""
        lineage = branch.lineage(op)
        return self.wait(lambda: self.store.reply(op, lineage))

    def read(self, branch: Branch, name: str | None, binding: Binding) -> Any:
        if isinstance(binding, Given):
            return binding.value
        if isinstance(binding, Gathered):
            return [
                None if item is None else self.read(branch, name, item) for item in binding.items
            ]
        return self.made(binding).value

    def known(self, text: str) -> str:
        if is_plain(text):
            return text
        return "".join(
            str(part) if ref is None else self._referred(ref) for part, ref in pieces(text)
        )

    def _referred(self, ref: SymbolRef) -> str:
        if ref.owner != self.owner:
            what = f"a reference to {ref.name!r} of another program cannot be compared"
            raise ProgramError(what, where=here() or None)
        lineage = self.branches[ref.stream].lineage(ref.op)
        return str(self.wait(lambda: self.store.value(ref.op, ref.name, lineage)).value)

    def meta(self, binding: Binding, timeout: float | None = None) -> Any:
        """``meta_info`` of a variable: a dict; a list where the variable is one."""
        if isinstance(binding, Given):
            return {}
        if isinstance(binding, Gathered):
            return [None if item is None else self.meta(item, timeout) for item in binding.items]
        return as_dicts(self.made(binding, timeout).meta)

    def errors(self, branch: Branch) -> RametError | None:
        """Why a branch (or, for the root, any branch) has failed so far."""
        store = self.store
        found = [store.failed[stream] for stream, _ in branch.lineage(0) if stream in store.failed]
        if not found and branch is self.root:
            found = store.failures[:1]
        error = found[0].error if found else store.fatal
        return None if error is None else error.exception()

    def result(self) -> Any:
        """What the function returned."""
        return self.returned


def _check(timeout: object, cache_salt: object) -> None:
    """Raise `BadInputError` for what a run cannot begin with."""
    if timeout is not None and (
        isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or math.isnan(timeout)
    ):
        raise BadInputError(
            f"timeout must be a number of seconds, not {timeout!r}", param="timeout"
        )
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise BadInputError(f"cache_salt must be a string, not {cache_salt!r}", param="cache_salt")


def as_dicts(meta: MetaInfo | list[MetaInfo] | None) -> Any:
    """Meta info as plain data."""
    if meta is None:
        return {}
    return [item.as_dict() for item in meta] if isinstance(meta, list) else meta.as_dict()
