"""Programs as data: instructions over named streams.

A stream is a branch of a program: a growing text, its variables and its chat messages. Stream 0
exists from the start; `Fork` makes more. Instructions of one stream run in order, those of
different streams at the same time. Every instruction that yields a value has an ``op`` number,
unique in its program, under which the value is reported.

Names in a `Ref` are resolved when the instruction is *taken in*, to the latest binding of that name
before it in the program, so that a loop which binds ``x`` again and again reads as Python does.
Those of a *block* (an arm of a `Switch`, the body of a `Repeat`) are taken in each time it is
entered."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

ROOT = 0

ChoicesMethod = Literal[
    "token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"
]
JoinMode = Literal["gather_variable", "concate_and_append"]
Match = Literal["strip", "exact", "contains"]
"""When a value matches a text: equal but for blanks at their ends, equal, or holding it."""


class Ref(msgspec.Struct, frozen=True, tag="ref"):
    """The text of a variable of a stream, known when its generation has finished."""

    stream: int
    name: str


class Arg(msgspec.Struct, frozen=True, tag="arg"):
    """An argument of a compiled program, given with each run. Inserted as ``str(value)``."""

    name: str


Part = str | Ref | Arg
Parts = tuple[Part, ...]


class _Instruction(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    stream: int = ROOT
    op: int = -1
    line: str = ""


class Text(_Instruction, frozen=True, kw_only=True, tag="text"):
    """Append literals and references. Text is tokenized only when a `Gen` or `Select` needs it."""

    parts: Parts


class Gen(_Instruction, frozen=True, kw_only=True, tag="gen"):
    """Generate, append, bind. ``sampling`` holds what was given, over the program's defaults."""

    name: str | None = None
    sampling: dict[str, Any] = {}


class Select(_Instruction, frozen=True, kw_only=True, tag="select"):
    """Score the choices as continuations, append the best, bind it."""

    name: str | None = None
    choices: tuple[Parts, ...] = ()
    method: ChoicesMethod = "token_length_normalized"
    boundary: Literal["exact", "plain"] = "exact"
    explain: bool | None = None
    """Whether the meta info is to say where the prompt left what was cached; ``None``: what the
    program's sampling says."""


class RoleBegin(_Instruction, frozen=True, kw_only=True, tag="role_begin"):
    """Open a chat message; the tokenizer's own template supplies the markers."""

    role: str


class RoleEnd(_Instruction, frozen=True, kw_only=True, tag="role_end"):
    """Close the open chat message."""

    role: str


class Fork(_Instruction, frozen=True, kw_only=True, tag="fork"):
    """Start ``children`` as copies of this stream: text, variables, messages, open role."""

    children: tuple[int, ...]


class Join(_Instruction, frozen=True, kw_only=True, tag="join"):
    """Wait for ``children`` and end them; gather their new variables as lists, or their new
    text."""

    children: tuple[int, ...]
    mode: JoinMode = "gather_variable"


class Bind(_Instruction, frozen=True, kw_only=True, tag="bind"):
    """Set a variable without generating."""

    name: str
    parts: Parts


class ScopeBegin(_Instruction, frozen=True, kw_only=True, tag="scope_begin"):
    """From here on, the text produced is also collected for variable ``name``."""

    name: str


class ScopeEnd(_Instruction, frozen=True, kw_only=True, tag="scope_end"):
    """Bind what was produced since the matching `ScopeBegin`; ``op`` reports the value."""

    name: str


class Sync(_Instruction, frozen=True, kw_only=True, tag="sync"):
    """Report, when reached, the stream's whole text or its chat messages (or just that it was)."""

    want: Literal["nothing", "text", "messages"] = "nothing"


class Warm(_Instruction, frozen=True, kw_only=True, tag="warm"):
    """Prefill what the stream holds so far, so that later programs find it cached."""


class End(_Instruction, frozen=True, kw_only=True, tag="end"):
    """Nothing follows on this stream; its resources may go."""


class Condition(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whether a value matches one of some texts."""

    value: Parts
    texts: tuple[str, ...]
    match: Match = "strip"


class Switch(_Instruction, frozen=True, kw_only=True, tag="switch"):
    """Run the instructions of the first case whose text the value matches, else ``default``.

    A block's instructions are of the block's own stream, or of streams forked inside; those end
    with it, at the latest. A role or a variable scope that begins in it ends in it. What it binds
    on its own stream stays bound; ``op`` reports the names that any arm binds when it is left,
    with value ``None`` for those that have none."""

    value: Parts
    cases: dict[str, tuple[Instruction, ...]] = {}
    default: tuple[Instruction, ...] = ()
    match: Match = "strip"


class Repeat(_Instruction, frozen=True, kw_only=True, tag="repeat"):
    """Run ``body``, a block as those of `Switch`, up to ``times`` times: until, after a turn,
    ``until`` holds. ``count`` is bound to the turn's number, from 1, as each begins."""

    body: tuple[Instruction, ...]
    times: int
    until: Condition | None = None
    count: str | None = None


Instruction = (
    Text
    | Gen
    | Select
    | RoleBegin
    | RoleEnd
    | Fork
    | Join
    | Bind
    | ScopeBegin
    | ScopeEnd
    | Sync
    | Warm
    | End
    | Switch
    | Repeat
)


class Program(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Instructions, the arguments they refer to, and default sampling parameters."""

    instructions: tuple[Instruction, ...] = ()
    args: tuple[str, ...] = ()
    sampling: dict[str, Any] = {}
    name: str = ""
