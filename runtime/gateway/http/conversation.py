"""The messages of a request, checked and in one form, whatever way clients write them."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from .depth import check_depth
from .errors import HttpError, bad, cut
from .reading import holds_more

MOST_MESSAGES = 4096
MOST_CALLS = 4096
MOST_ARGUMENTS = 1 << 16
"""Values in the arguments of one call."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Known whatever the chat template; one that names more may be given those too."""
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")  # templates print it among their markers
_TEXT_PARTS = ("text", "input_text", "output_text")
_MOST_NAME = 256


def read_conversation(
    messages: Sequence[Mapping[str, Any]], source: Callable[[], str]
) -> list[dict[str, Any]]:
    """Messages with ``role`` and ``content`` as texts, and where there are any ``tool_calls``,
    ``tool_call_id``, ``name`` (of a tool) and ``reasoning_content``. Arguments of calls are JSON
    objects, or texts where they are not valid. ``source`` tells the template, asked for only where
    a role is none of `ROLES`. Raises `HttpError` that names what is wrong."""
    if not 1 <= len(messages) <= MOST_MESSAGES:
        raise bad(f"1 to {MOST_MESSAGES} messages are needed, not {len(messages)}", "messages")
    calls = [message.get("tool_calls") for message in messages]
    count = sum(len(given) for given in calls if isinstance(given, list))
    if count > MOST_CALLS:
        raise bad(f"tool_calls: at most {MOST_CALLS} in all messages, not {count}", "messages")
    return [_message(message, number, source) for number, message in enumerate(messages)]


def is_plain(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether there is nothing but roles and contents."""
    return all(len(message) == 2 for message in messages)


def for_template(messages: Sequence[dict[str, Any]], source: str) -> list[dict[str, Any]]:
    """Messages as a template looks at them: some know a message of calls by having no content."""
    if "is none" not in source:
        return list(messages)
    return [
        {**message, "content": None} if message.get("tool_calls") and not message["content"]
        else message
        for message in messages
    ]  # fmt: skip


def with_arguments_as_texts(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """The same for a template that joins the arguments of calls to its own text instead of writing
    them as JSON. ``None`` where there are no calls."""
    if not any(message.get("tool_calls") for message in messages):
        return None
    return [
        {**message, "tool_calls": [_with_text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls") else message
        for message in messages
    ]  # fmt: skip


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _message(message: Mapping[str, Any], number: int, source: Callable[[], str]) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise _wrong(number, "role must be the name of a role")
    if role not in ROLES and not any(f"{quote}{role}{quote}" in source() for quote in "'\""):
        raise _wrong(number, f"role {role!r} is none of {', '.join(ROLES)}")
    found: dict[str, Any] = {"role": "system" if role == "developer" else role}
    found["content"] = _content(message.get("content"), number, role)
    if role == "tool":
        for key in ("tool_call_id", "name"):
            if message.get(key) is not None:
                found[key] = _short(message[key], f"{key}", number)
    if role != "assistant":
        return found
    thought = message.get("reasoning_content", message.get("reasoning"))
    if thought is not None:
        if not isinstance(thought, str):
            raise _wrong(number, "reasoning_content must be a text")
        found["reasoning_content"] = thought
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise _wrong(number, "tool_calls must be a list")
        found["tool_calls"] = [_call(call, number, place) for place, call in enumerate(calls)]
    return found


def _call(call: Any, number: int, place: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise _wrong(number, f"tool_calls[{place}].function is missing")
    name = _short(function.get("name"), f"tool_calls[{place}].function.name", number)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        if holds_more(arguments.encode(), MOST_ARGUMENTS):
            raise _wrong(number, f"tool_calls[{place}]: over {MOST_ARGUMENTS} values")
        # What is not valid stays a text: the model wrote it, and may see its mistake.
        with contextlib.suppress(msgspec.DecodeError, RecursionError, ValueError):
            arguments = msgspec.json.decode(arguments) if arguments.strip() else {}
    elif arguments is None:
        arguments = {}
    elif not isinstance(arguments, dict):
        raise _wrong(number, f"tool_calls[{place}].function.arguments must be a text")
    check_depth(arguments, f"messages[{number}].tool_calls[{place}]", "messages")
    found: dict[str, Any] = {
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    if call.get("id") is not None:
        found["id"] = _short(call["id"], f"tool_calls[{place}].id", number)
    return found


def _short(value: Any, name: str, number: int) -> str:
    if not isinstance(value, str) or len(value) > _MOST_NAME:
        raise _wrong(number, f"{name} must be a text of at most {_MOST_NAME} characters")
    return value


def _content(content: Any, number: int, role: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, list):
        raise _wrong(number, "content must be a text or a list of parts")
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "refusal" and role == "assistant":
            text = part.get("refusal")
        elif kind in _TEXT_PARTS:
            text = part.get("text")
        else:
            raise _wrong(number, f"content: parts of type {cut(str(kind), 40)} are not supported")
        if not isinstance(text, str):
            raise _wrong(number, "content: a part's text must be a string")
        texts.append(text)
    return "\n".join(texts)


def _wrong(number: int, what: str) -> HttpError:
    return bad(f"messages[{number}].{what}", "messages")
