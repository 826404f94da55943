"""A program for people to read: one instruction a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
from ramet.runtime.program.instructions import Arg, Fork, Instruction, Join, Parts, Program, Ref

_PLAIN = ("stream", "op", "line", "parts", "choices", "children", "sampling", "name", "role")


def listing(program: Program) -> str:
    """One instruction a line: stream, kind, what it does, the source line."""
    rows = [_row(instruction) for instruction in program.instructions]
    width = max((len(what) for _, _, what, _ in rows), default=0)
    lines = [f"program {program.name}({', '.join(program.args)})"]
    for stream, kind, what, line in rows:
        text = f"{stream:>4}  {kind:<11}  {what:<{min(width, 60)}}"
        lines.append(f"{text}  # {line}" if line else text.rstrip())
    return "\n".join(lines)


def _row(instruction: Instruction) -> tuple[int, str, str, str]:
    data: dict[str, Any] = msgspec.to_builtins(instruction)
    return instruction.stream, data["type"], " ".join(_words(instruction, data)), instruction.line


def _words(instruction: Instruction, data: dict[str, Any]) -> Iterator[str]:
    for key in ("name", "role"):
        if data.get(key) is not None:
            yield str(data[key])
    if isinstance(instruction, (Fork, Join)):
        arrow = "->" if isinstance(instruction, Fork) else "<-"
        yield f"{arrow} {', '.join(map(str, instruction.children))}"
    parts: Parts | None = getattr(instruction, "parts", None)
    if parts is not None:
        yield _text(parts)
    choices: tuple[Parts, ...] = getattr(instruction, "choices", ())
    if choices:
        yield f"[{', '.join(_text(choice) for choice in choices)}]"
    sampling: dict[str, Any] = getattr(instruction, "sampling", {})
    for key, value in sampling.items():
        yield f"{key}={json.dumps(value, ensure_ascii=False, default=str)}"
    for key, value in data.items():
        if key not in _PLAIN and key != "type":
            yield f"{key}={value}"


def _text(parts: Parts) -> str:
    return " ".join(_part(part) for part in parts) if parts else '""'


def _part(part: str | Ref | Arg) -> str:
    if isinstance(part, Ref):
        return f"{{{part.name}@{part.stream}}}"
    if isinstance(part, Arg):
        return f"{{{part.name}}}"
    return json.dumps(part, ensure_ascii=False)
