"""The tools that a request offers, checked, and how a model without a form of its own is told."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..depth import check_depth
from ..errors import HttpError, bad, cut

MOST_TOOLS = 512
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(frozen=True, slots=True)
class Offer:
    """``choice``: auto, required, or the name of the one tool to call. ``most``: calls an answer
    may hold; ``None`` for any number."""

    tools: tuple[Mapping[str, Any], ...]
    """As OpenAI writes them: ``{"type": "function", "function": {name, description, …}}``."""
    choice: str = "auto"
    named: bool = False
    most: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tool["function"]["name"] for tool in self.tools)

    @property
    def wanted(self) -> tuple[Mapping[str, Any], ...]:
        """Those that may be called."""
        if not self.named:
            return self.tools
        return tuple(tool for tool in self.tools if tool["function"]["name"] == self.choice)

    @property
    def forced(self) -> bool:
        """Whether the answer must be a call."""
        return self.named or self.choice == "required"


def read_offer(tools: Any, choice: Any, parallel: bool | None) -> Offer | None:
    """What ``tools``, ``tool_choice`` and ``parallel_tool_calls`` say; ``None`` where no tool is to
    be called. Raises `HttpError`."""
    if tools is None:
        if choice not in (None, "none", "auto"):
            raise bad("tool_choice needs tools", "tool_choice")
        return None
    if not isinstance(tools, list) or not 1 <= len(tools) <= MOST_TOOLS:
        raise bad(f"tools must be a list of 1 to {MOST_TOOLS} tools", "tools")
    checked = tuple(_checked(tool, number) for number, tool in enumerate(tools))
    most = 1 if parallel is False else None
    offer = Offer(checked, most=most)
    if len(set(offer.names)) < len(checked):
        raise bad("tools: two have the same name", "tools")
    if choice == "none":
        return None
    if choice in (None, "auto"):
        return offer
    if choice == "required":
        return Offer(checked, "required", most=most)
    name = _chosen(choice)
    if name not in offer.names:
        raise bad(f"tool_choice: no tool is called {cut(name, 80)!r}", "tool_choice")
    return Offer(checked, name, named=True, most=1)


def _checked(tool: Any, number: int) -> Mapping[str, Any]:
    where = f"tools[{number}]"
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        raise bad(f"{where}: only tools of type function are supported", "tools")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise bad(f"{where}.function is missing", "tools")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise bad(f"{where}.function.name must be 1 to 128 of A-Z a-z 0-9 _ . -", "tools")
    if not isinstance(function.get("description"), str | None):
        raise bad(f"{where}.function.description must be a text", "tools")
    if not isinstance(function.get("parameters"), dict | None):
        raise bad(f"{where}.function.parameters must be a JSON schema", "tools")
    check_depth(function, f"{where}.function", "tools")
    kept = {key: value for key, value in function.items() if value is not None}
    return {"type": "function", "function": kept}


def _chosen(choice: Any) -> str:
    kind = choice.get("type") if isinstance(choice, dict) else None
    name: Any = None
    if kind == "function":
        inner = choice.get("function")
        name = inner.get("name") if isinstance(inner, dict) else choice.get("name")
    if not isinstance(name, str):
        raise _bad_choice()
    return name


def _bad_choice() -> HttpError:
    return bad(
        'tool_choice must be none, auto, required or {"type": "function", "function": {"name": …}}',
        "tool_choice",
    )


# --- for templates that know no tools -------------------------------------------------------------


def told_in_words(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], system: bool
) -> list[dict[str, Any]]:
    """The messages with the tools described in the first one, and with calls and their results as
    texts, in the form that `HermesParser` reads. ``system``: whether the template has a place for a
    system message."""
    found: list[dict[str, Any]] = []
    for message in messages:
        content = message["content"]
        if message["role"] == "tool":
            said = f"<tool_response>\n{content}\n</tool_response>"
            if found and found[-1].get("results"):
                found[-1]["content"] += "\n" + said
            else:
                found.append({"role": "user", "content": said, "results": True})
            continue
        calls = [_as_text(call["function"]) for call in message.get("tool_calls") or ()]
        found.append(
            {"role": message["role"], "content": "\n".join(filter(None, [content, *calls]))}
        )
    if tools:
        _describe(found, tools, system)
    return [{"role": message["role"], "content": message["content"]} for message in found]


def _as_text(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def _describe(
    messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], system: bool
) -> None:
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = (
        "You can call functions to help the user. The functions are:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "To call one, answer with its name and its arguments as JSON:\n"
        '<tool_call>\n{"name": "the function", "arguments": {"an argument": "its value"}}\n'
        "</tool_call>"
    )
    first = messages[0]
    if first["role"] == "system":
        first["content"] = "\n\n".join(filter(None, [first["content"], text]))
    elif system:
        messages.insert(0, {"role": "system", "content": text})
    else:
        first["content"] = f"{text}\n\n{first['content']}"
