"""A program for people to read: one instruction a line, blocks set in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
from ramet.runtime.program.instructions import (
    Arg,
    Condition,
    Fork,
    Instruction,
    Join,
    Parts,
    Program,
    Ref,
    Repeat,
    Switch,
)

_PLAIN = (
    *("stream", "op", "line", "parts", "choices", "children", "sampling", "name", "role"),
    *("value", "cases", "default", "body", "until", "times", "count"),
)
Row = tuple[str, str, str, str]
"""Stream, kind, what it does, source line."""


def listing(program: Program) -> str:
    """One instruction a line: stream, kind, what it does, the source line."""
    rows = [row for instruction in program.instructions for row in _rows(instruction, "")]
    width = max((len(what) for _, _, what, _ in rows), default=0)
    lines = [f"program {program.name}({', '.join(program.args)})"]
    for stream, kind, what, line in rows:
        text = f"{stream:>4}  {kind:<11}  {what:<{min(width, 60)}}"
        lines.append(f"{text}  # {line}" if line else text.rstrip())
    return "\n".join(lines)


def _rows(instruction: Instruction, indent: str) -> Iterator[Row]:
    data: dict[str, Any] = msgspec.to_builtins(instruction)
    what = " ".join(_words(instruction, data))
    yield str(instruction.stream), f"{indent}{data['type']}", what, instruction.line
    deeper = indent + "  "
    if isinstance(instruction, Repeat):
        for one in instruction.body:
            yield from _rows(one, deeper)
        if instruction.until is not None:
            yield "", f"{indent}until", _condition(instruction.until), ""
    elif isinstance(instruction, Switch):
        for text, arm in instruction.cases.items():
            yield "", f"{indent}case", json.dumps(text, ensure_ascii=False), ""
            for one in arm:
                yield from _rows(one, deeper)
        if instruction.default:
            yield "", f"{indent}default", "", ""
            for one in instruction.default:
                yield from _rows(one, deeper)


def _condition(condition: Condition) -> str:
    texts = " or ".join(json.dumps(text, ensure_ascii=False) for text in condition.texts)
    verb = {"strip": "is", "exact": "is exactly", "contains": "contains"}[condition.match]
    return f"{_text(condition.value)} {verb} {texts}"


def _words(instruction: Instruction, data: dict[str, Any]) -> Iterator[str]:
    for key in ("name", "role"):
        if data.get(key) is not None:
            yield str(data[key])
    if isinstance(instruction, (Fork, Join)):
        arrow = "->" if isinstance(instruction, Fork) else "<-"
        yield f"{arrow} {', '.join(map(str, instruction.children))}"
    if isinstance(instruction, Switch):
        yield _text(instruction.value)
    elif isinstance(instruction, Repeat):
        counted = f" counted in {instruction.count}" if instruction.count is not None else ""
        yield f"{instruction.times} times{counted}"
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
