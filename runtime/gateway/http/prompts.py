"""From a prompt or messages to token ids, through the tokenizer and template of all other paths."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...protocol.errors import BadInputError
from ..executor import EngineExecutor
from ..generate import prompt_ids
from ..request import IntArray
from ..template import ChatTemplate
from .conversation import (
    for_template,
    is_plain,
    read_conversation,
    with_arguments_as_texts,
)
from .errors import bad
from .own_template import render_apart
from .rendered import Marking, Rendered, by_skeleton
from .tools.offered import told_in_words

_LONG_CHARACTERS = 50_000
_TOOLS = re.compile(r"\btools\b")
_OURS = frozenset(("messages", "tools", "add_generation_prompt"))


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """``opening``: the text that it ends with, from behind the last message's content on."""

    ids: IntArray
    opening: str


async def ids_of_prompt(
    executor: EngineExecutor, prompt: str | list[int], *, start: bool = True
) -> IntArray:
    """``start`` false leaves out what the tokenizer puts before a text. Raises `HttpError` and
    `BadInputError`, also for a prompt beyond the context."""
    if isinstance(prompt, list):
        ids = prompt_ids(executor, None, prompt)
    elif start:
        ids = await _cut(executor, len(prompt), lambda: prompt_ids(executor, prompt, None))
    else:
        encode = executor.tokenizer.encode
        ids = np.asarray(await _cut(executor, len(prompt), lambda: encode(prompt)), np.int32)
    return fitting(executor, ids)


async def prompt_of_messages(
    executor: EngineExecutor,
    messages: Sequence[Mapping[str, Any]],
    *,
    answer: bool = True,
    go_on: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
    template: str | None = None,
    then: Callable[[str], str] | None = None,
) -> ChatPrompt:
    """The same with ``tools`` offered, more ``variables`` for the template, another ``template``
    (rendered apart, as it is not trusted), and what ``then`` makes of the opening as the beginning
    of the answer."""
    conversation = read_conversation(
        messages, lambda: executor.tokenizer.template.source if template is None else template
    )
    for name in variables or ():
        if name in _OURS:
            raise bad(
                f"chat_template_kwargs: {name} has a field of its own", "chat_template_kwargs"
            )
    rendered = await _rendered(
        executor, conversation, answer and not go_on, go_on, tools, dict(variables or {}), template
    )
    begun = "" if then is None else then(rendered.opening)
    segments = [*rendered.segments, *([(begun, True)] if begun else [])]
    size = sum(len(text) for text, _ in segments)
    encode = executor.tokenizer.encode_segments
    ids = await _cut(executor, size, lambda: np.asarray(encode(segments), np.int32))
    return ChatPrompt(fitting(executor, ids), rendered.opening)


async def _rendered(
    executor: EngineExecutor,
    messages: list[dict[str, Any]],
    answer: bool,
    go_on: bool,
    tools: Sequence[Mapping[str, Any]],
    variables: dict[str, Any],
    own: str | None,
) -> Rendered:
    tokenizer = executor.tokenizer
    if own is None:
        template = tokenizer.template
        if (tools or not is_plain(messages)) and not _TOOLS.search(template.source):
            messages = told_in_words(messages, tools, _has_system(template))
            tools = ()
        if not tools and not variables and is_plain(messages):
            return by_skeleton(template, messages, answer, go_on)
    source = tokenizer.template.source if own is None else own
    asked: dict[str, Any] = {
        **variables,
        "messages": for_template(messages, source),
        "add_generation_prompt": answer,
        **({"tools": tools} if tools else {}),
    }
    marking = Marking(tokenizer, source, asked, go_on)
    if own is not None:
        return marking.cut(await render_apart(own, tokenizer.named_tokens, marking.variables))
    try:
        return marking.cut(tokenizer.template.render(**marking.variables))
    except BadInputError:
        asked["messages"] = with_arguments_as_texts(asked["messages"])
        if asked["messages"] is None:
            raise
    marking = Marking(tokenizer, source, asked, go_on)
    return marking.cut(tokenizer.template.render(**marking.variables))


def _has_system(template: ChatTemplate) -> bool:
    try:
        template.skeleton(("system", "user"), True)
    except BadInputError:
        return False
    return True


def fitting(executor: EngineExecutor, ids: IntArray) -> IntArray:
    """The same ids. Raises `HttpError` when they are beyond the context."""
    if len(ids) > executor.context_length:
        raise bad(
            f"This model's maximum context length is {executor.context_length} tokens. However,"
            f" the prompt has {len(ids)} tokens",
            "prompt",
        )
    return ids


async def _cut(executor: EngineExecutor, size: int, encode: Any) -> Any:
    """Long texts are cut in a thread, so that others go on meanwhile; those that cannot fit are not
    cut at all: it would take seconds. ``size`` is in characters. Raises `HttpError`."""
    if size < _LONG_CHARACTERS:
        return encode()
    most = executor.context_length
    if size > most * executor.tokenizer.longest_token:
        raise bad(
            f"This model's maximum context length is {most} tokens. However, the prompt has"
            f" {size} characters",
            "prompt",
        )
    return await asyncio.to_thread(encode)
