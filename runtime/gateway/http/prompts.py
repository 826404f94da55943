"""From a prompt or messages to token ids, through the tokenizer and template of all other paths."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...protocol.errors import BadInputError
from ..executor import EngineExecutor
from ..generate import prompt_ids
from ..request import IntArray
from ..template import sentinel
from ..tokenizer import Tokenizer
from .errors import bad, cut

MOST_MESSAGES = 4096
_LONG_CHARACTERS = 50_000
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")  # templates print it among their markers
_TEXT_PARTS = ("text", "input_text", "output_text")


async def ids_of_prompt(
    executor: EngineExecutor, prompt: str | list[int], *, start: bool = True
) -> IntArray:
    """``start`` false leaves out what the tokenizer puts before a text. Raises `HttpError` and
    `BadInputError`, also for a prompt beyond the context."""
    if isinstance(prompt, list):
        ids = prompt_ids(executor, None, prompt)
    elif start:
        ids = await _threaded(len(prompt), lambda: prompt_ids(executor, prompt, None))
    else:
        encode = executor.tokenizer.encode
        ids = np.asarray(await _threaded(len(prompt), lambda: encode(prompt)), np.int32)
    return _fitting(executor, ids)


async def ids_of_messages(
    executor: EngineExecutor,
    messages: Sequence[Mapping[str, Any]],
    *,
    answer: bool = True,
    go_on: bool = False,
) -> IntArray:
    """Messages in the model's own form. ``answer`` opens the assistant's; ``go_on`` leaves the last
    one open. Special tokens are not parsed in contents. Raises `HttpError`, `BadInputError`."""
    roles, contents = read_messages(messages)
    size = sum(map(len, contents))
    tokenizer = executor.tokenizer
    ids = await _threaded(size, lambda: _rendered(tokenizer, roles, contents, answer, go_on))
    return _fitting(executor, ids)


def read_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], list[str]]:
    """Roles and contents. Raises `HttpError` that names the message which is wrong."""
    if not 1 <= len(messages) <= MOST_MESSAGES:
        raise bad(f"1 to {MOST_MESSAGES} messages are needed, not {len(messages)}", "messages")
    roles: list[str] = []
    contents: list[str] = []
    for number, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str) or not _ROLE.fullmatch(role):
            raise bad(f"messages[{number}].role must be the name of a role", "messages")
        if message.get("tool_calls"):
            raise bad(f"messages[{number}].tool_calls: tools are not supported yet", "messages")
        roles.append("system" if role == "developer" else role)
        contents.append(_content(message.get("content"), number, role))
    return tuple(roles), contents


def _content(content: Any, number: int, role: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, list):
        raise bad(f"messages[{number}].content must be a text or a list of parts", "messages")
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS:
            what = cut(str(kind), 40)
            raise bad(f"messages[{number}].content: parts of type {what} are not supported",
                      "messages")  # fmt: skip
        text = part.get("text")
        if not isinstance(text, str):
            raise bad(f"messages[{number}].content: a part's text must be a string", "messages")
        texts.append(text)
    return "\n".join(texts)


def _rendered(
    tokenizer: Tokenizer, roles: tuple[str, ...], contents: list[str], answer: bool, go_on: bool
) -> IntArray:
    template = tokenizer.template
    form = template.skeleton(roles, answer and not go_on)
    padded = template.skeleton(roles, answer and not go_on, padded=True)
    last = len(roles) - 1
    if go_on:
        head, found, _ = form.partition(sentinel(last))
        form = head + found
    segments: list[tuple[str, bool]] = []
    shown: set[int] = set()
    for place, piece in enumerate(re.split("\ue000([0-9]+)\ue001", form)):
        if place % 2 == 0:
            segments.append((piece, True))
            continue
        number = int(piece)
        if number in shown:
            raise BadInputError("the chat template shows a message twice", param="messages")
        shown.add(number)
        text = contents[number]
        if f" {sentinel(number)} " not in padded:  # the template strips it
            text = text.lstrip() if go_on and number == last else text.strip()
        segments.append((text, False))
    for number, text in enumerate(contents):
        if text and number not in shown:
            raise BadInputError(
                f"the chat template has no place for messages[{number}], of role {roles[number]!r}",
                param="messages",
            )
    return np.asarray(tokenizer.encode_segments(segments), np.int32)


def _fitting(executor: EngineExecutor, ids: IntArray) -> IntArray:
    if len(ids) > executor.context_length:
        raise bad(
            f"This model's maximum context length is {executor.context_length} tokens. However,"
            f" the prompt has {len(ids)} tokens",
            "prompt",
        )
    return ids


async def _threaded(size: int, encode: Any) -> Any:
    """Long texts are cut in a thread, so that others go on meanwhile."""
    return encode() if size < _LONG_CHARACTERS else await asyncio.to_thread(encode)
