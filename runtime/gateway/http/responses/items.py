"""From the items of a conversation to the messages that a chat template knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import bad, cut

Item = dict[str, Any]
Message = dict[str, Any]

_TEXTS = ("input_text", "output_text", "text")
_SYSTEM = ("system", "developer")


def items_of(given: str | list[Item] | None) -> list[Item]:
    """The input as items, each of a known type. Raises `HttpError` for one that is not."""
    if given is None:
        return []
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return [_checked(item, number) for number, item in enumerate(given)]


def messages_of(instructions: str | None, items: Sequence[Item]) -> list[Message]:
    """``instructions`` come first, joined with system messages that stand at the start. Calls join
    the assistant's message before them, thinking the one behind it."""
    found: list[Message] = []
    thought = ""
    if instructions:
        found.append({"role": "system", "content": instructions})
    for item in items:
        kind = item["type"]
        if kind == "message":
            role = "system" if item["role"] in _SYSTEM else item["role"]
            content = _text(item["content"])
            if role == "system" and len(found) == 1 and found[0]["role"] == "system":
                found[0]["content"] += "\n\n" + content
            else:
                found.append({"role": role, "content": content})
                thought = _thought(found, thought)
        elif kind == "reasoning":
            thought = _thinking(item)
        elif kind == "function_call":
            _add_call(found, item)
            thought = _thought(found, thought)
        elif kind == "function_call_output":
            output = _text(item["output"])
            found.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
    return found


def _add_call(found: list[Message], item: Item) -> None:
    function = {"name": item["name"], "arguments": item["arguments"]}
    call = {"id": item["call_id"], "type": "function", "function": function}
    if not found or found[-1]["role"] != "assistant":
        found.append({"role": "assistant", "content": None})
    found[-1].setdefault("tool_calls", []).append(call)


def _thinking(item: Item) -> str:
    """Its text, where its writer shows it."""
    parts = item.get("content") or item.get("summary") or []
    return "\n".join(part["text"] for part in parts)


def _thought(found: list[Message], thought: str) -> str:
    """Put thinking to the last message, if that is the assistant's; returns what is left of it."""
    if thought and found[-1]["role"] == "assistant":
        found[-1].setdefault("reasoning_content", thought)
    return ""


def _checked(item: Item, number: int) -> Item:
    kind = item.get("type")
    if kind is None and "role" in item:
        kind = "message"
        item = {"type": kind, **item}
    if kind == "message":
        if not isinstance(item.get("role"), str):
            raise bad(f"input[{number}].role must be a text", "input")
        _check_content(item.get("content"), f"input[{number}].content")
    elif kind == "function_call":
        for name in ("call_id", "name", "arguments"):
            if not isinstance(item.get(name), str):
                raise bad(f"input[{number}].{name} must be a text", "input")
    elif kind == "function_call_output":
        if not isinstance(item.get("call_id"), str):
            raise bad(f"input[{number}].call_id must be a text", "input")
        _check_content(item.get("output"), f"input[{number}].output")
    elif kind == "reasoning":
        for name in ("content", "summary"):
            _check_thinking(item.get(name), f"input[{number}].{name}")
    else:
        raise bad(f"input[{number}]: items of type {cut(str(kind), 40)} are not supported", "input")
    return item


def _check_content(content: Any, where: str) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise bad(f"{where} must be a text or a list of parts", "input")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXTS:
            raise bad(f"{where}: parts of type {cut(str(kind), 40)} are not supported", "input")
        if not isinstance(part.get("text"), str):
            raise bad(f"{where}: a part's text must be a string", "input")


def _check_thinking(parts: Any, where: str) -> None:
    if not isinstance(parts, list | None) or not all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts or ()
    ):
        raise bad(f"{where} must be a list of parts with texts", "input")


def _text(content: str | list[Item]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content)
