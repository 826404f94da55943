"""Text that is not known yet: arguments and values of a program that is being traced.

A symbol is a string whose content is a marker. Concatenation, ``str.join`` and f-strings carry the
marker along inside ordinary text; `split` takes the text apart again. The marker holds upper and
lower case, tabs at its ends and a random nonce, so that an operation which would have needed the
real text (``upper``, ``strip``, a slice) is noticed instead of compiled wrongly.
"""

from __future__ import annotations

import functools
import re
import secrets
from typing import Any, NamedTuple, NoReturn, SupportsIndex

from ramet.runtime.program.instructions import Arg, Part, Ref
from ramet.runtime.protocol import ProgramError

from .source import here

_OPEN = "\ue0f0"
_CLOSE = "\ue0f1"
_NONCE = secrets.token_hex(6)  # one for the process: threads that trace at once must agree on it


class SymbolRef(NamedTuple):
    """A variable of a stream as bound by instruction ``op`` of the recording ``owner``."""

    owner: int
    stream: int
    op: int
    name: str


@functools.cache
def _pattern() -> re.Pattern[str]:
    fields = r"\.(\d+)\.([ar])\.(\d+)\.(-?\d+)\.([0-9a-f]*)"
    return re.compile(f"\t{_OPEN}aZ{_NONCE}{fields}{_CLOSE}\t")


def _mark(owner: int, kind: str, stream: int, op: int, name: str) -> str:
    return f"\t{_OPEN}aZ{_NONCE}.{owner}.{kind}.{stream}.{op}.{name.encode().hex()}{_CLOSE}\t"


def _refuse(what: str) -> NoReturn:
    raise ProgramError(
        f"{what} needs a value that is not known while a program is compiled; "
        "let it decide in s.switch() or s.repeat(), run the function uncompiled, or pass the "
        "argument to compile()/bind()",
        where=here() or None,
    )


class Symbol(str):
    """A string that stands for one that is not known yet. It can be concatenated, joined and put
    in an f-string; everything else raises `ProgramError` naming the line."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            _refuse(f".{name}")
        return super().__getattribute__(name)

    def __add__(self, other: str, /) -> Symbol:
        if not isinstance(other, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            return NotImplemented
        return Symbol(str.__add__(self, other))

    def __radd__(self, other: str) -> Symbol:
        if not isinstance(other, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            return NotImplemented
        return Symbol(str.__add__(other, self))

    def __str__(self) -> str:
        return self

    def __format__(self, spec: str, /) -> str:
        if spec:
            _refuse(f"the format {spec!r}")
        return str.__str__(self)

    def __repr__(self) -> str:
        return "<symbol " + "".join(_show(part) for part, _ in pieces(self)) + ">"

    def __eq__(self, other: object, /) -> bool:
        _refuse("a comparison")

    def __ne__(self, other: object, /) -> bool:
        _refuse("a comparison")

    def __lt__(self, other: str, /) -> bool:
        _refuse("a comparison")

    def __le__(self, other: str, /) -> bool:
        _refuse("a comparison")

    def __gt__(self, other: str, /) -> bool:
        _refuse("a comparison")

    def __ge__(self, other: str, /) -> bool:
        _refuse("a comparison")

    def __hash__(self) -> int:
        _refuse("a look-up")

    def __bool__(self) -> bool:
        _refuse("a truth test")

    def __len__(self) -> int:
        _refuse("len()")

    def __iter__(self) -> Any:
        _refuse("iteration")

    def __contains__(self, key: str, /) -> bool:
        _refuse("a membership test")

    def __getitem__(self, key: SupportsIndex | slice, /) -> str:
        _refuse("indexing")

    def __mul__(self, value: SupportsIndex, /) -> str:
        _refuse("arithmetic")

    __rmul__ = __mul__  # pyright: ignore
    __sub__ = __rsub__ = __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mul__
    __pow__ = __rpow__ = __neg__ = __abs__ = __mul__

    def __mod__(self, value: Any, /) -> str:
        _refuse("% formatting")

    def __int__(self) -> int:
        _refuse("int()")

    def __float__(self) -> float:
        _refuse("float()")

    def __index__(self) -> int:
        _refuse("use as a number")


def argument(owner: int, name: str) -> Symbol:
    """The symbol of an argument of a compiled program."""
    return Symbol(_mark(owner, "a", 0, -1, name))


def reference(ref: SymbolRef) -> Symbol:
    """The symbol of a variable's text."""
    return Symbol(_mark(ref.owner, "r", ref.stream, ref.op, ref.name))


def is_plain(text: str) -> bool:
    """Whether the text certainly holds no symbol (the fast test of every literal)."""
    return not str.__contains__(text, _OPEN)


def pieces(text: str, *, strict: bool = False) -> list[tuple[Part, SymbolRef | None]]:
    """Take text with markers apart: literals, `Arg`s and `Ref`s, with what each `Ref` means.

    Raises `ProgramError` where a marker was changed by a string operation; with ``strict`` also for
    what can only be the remains of one.
    """
    out: list[tuple[Part, SymbolRef | None]] = []
    plain = str.__str__(text) if type(text) is str else str.__getitem__(text, slice(None))
    position = 0
    for match in _pattern().finditer(plain):
        _literal(out, plain[position : match.start()], strict)
        owner, kind, stream, op, name = match.groups()
        name = bytes.fromhex(name).decode()
        if kind == "a":
            out.append((Arg(name), SymbolRef(int(owner), 0, -1, name)))
        else:
            ref = SymbolRef(int(owner), int(stream), int(op), name)
            out.append((Ref(ref.stream, name), ref))
        position = match.end()
    _literal(out, plain[position:], strict)
    return out


def _literal(out: list[tuple[Part, SymbolRef | None]], text: str, strict: bool) -> None:
    if not text:
        return
    broken = _NONCE in text.lower() or (strict and (_OPEN in text or _CLOSE in text))
    if broken:
        raise ProgramError(
            "a string operation changed text that holds a value not known while a program is "
            "compiled; append the value as it is",
            where=here() or None,
        )
    out.append((text, None))


def _show(part: Part) -> str:
    if isinstance(part, Ref):
        return f"{{{part.name}@{part.stream}}}"
    return f"{{{part.name}}}" if isinstance(part, Arg) else part
