"""From messages to the pieces of a prompt, by the template's skeleton or by a whole rendering.

Only what the template itself writes may hold special tokens. For plain messages it is rendered
around placeholders, once for each sequence of roles. Where a template looks at more than roles and
contents (tools, calls, variables), it is rendered with the real texts, and a mark is put into
whatever in them looks like a special token; the prompt is cut at the marks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from ...protocol.errors import BadInputError
from ..template import ChatTemplate, sentinel
from ..tokenizer import Tokenizer

Segments = list[tuple[str, bool]]
_MARKS = [chr(point) for point in range(0xE100, 0xE140)]
_SHORT = 64


@dataclass(frozen=True, slots=True)
class Rendered:
    """``segments``: texts, and whether special tokens are parsed in them. ``opening``: how the
    prompt ends, from behind the last message's content on."""

    segments: Segments
    opening: str


def by_skeleton(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], answer: bool, go_on: bool
) -> Rendered:
    """Plain messages. ``answer`` opens the assistant's; ``go_on`` leaves the last one open. Raises
    `BadInputError`."""
    roles = tuple(message["role"] for message in messages)
    contents = [message["content"] for message in messages]
    form = template.skeleton(roles, answer and not go_on)
    padded = template.skeleton(roles, answer and not go_on, padded=True)
    last = len(roles) - 1
    if go_on:
        head, found, _ = form.partition(sentinel(last))
        form = head + found
    segments: Segments = []
    shown: set[int] = set()
    pieces = re.split("\ue000([0-9]+)\ue001", form)
    for place, piece in enumerate(pieces):
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
            raise _no_place(number, roles[number])
    return Rendered(segments, pieces[-1])


class Marking:
    """One whole rendering. `variables` are what the template is to be rendered with; they hold
    ``messages``. ``source`` is the template's text. Raises `BadInputError`."""

    def __init__(
        self, tokenizer: Tokenizer, source: str, variables: Mapping[str, Any], go_on: bool
    ) -> None:
        known = msgspec.json.encode(variables).decode("utf-8", "replace") + source
        free = [mark for mark in _MARKS if mark not in known]
        if len(free) < 2:
            raise BadInputError("too many private-use characters", param="messages")
        self._mark, self._end = free[:2]
        self._go_on = go_on
        self.variables: dict[str, Any] = _marked(variables, special_starts(tokenizer), self._mark)
        self._messages: list[dict[str, Any]] = self.variables["messages"]
        if go_on:
            last = self._messages[-1]
            self._messages[-1] = {**last, "content": last["content"] + self._end}

    def cut(self, text: str) -> Rendered:
        """What the template made of `variables`, in pieces. Raises `BadInputError`."""
        for special in (self._mark, self._end):
            text = text.replace(f"\\u{ord(special):04x}", special)  # of a filter that writes ASCII
        if self._go_on:
            text, found, _ = text.rpartition(self._end)
            if not found:
                raise _no_place(len(self._messages) - 1, self._messages[-1]["role"])
        _check_shown(text, self._messages)
        content = (self._messages[-1]["content"] or "").strip().removesuffix(self._end)[-_SHORT:]
        at = text.rfind(content) if content else -1
        opening = text[at + len(content) :] if at >= 0 else text[-_SHORT:]
        segments = [(piece, True) for piece in text.split(self._mark)]
        return Rendered(segments, opening.replace(self._mark, ""))


@lru_cache(maxsize=4)
def special_starts(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Finds every place where a special token's text begins, also inside of another."""
    names = (tokenizer.inner.id_to_token(number) for number in tokenizer.special_ids)
    texts = sorted({re.escape(name) for name in names if name})
    return re.compile(f"(?=(?:{'|'.join(texts)}))(.)", re.DOTALL) if texts else None


def _marked(value: Any, starts: re.Pattern[str] | None, mark: str) -> Any:
    """The same with ``mark`` in all that looks like a special token."""
    if isinstance(value, str):
        return value if starts is None else starts.sub(lambda match: match[1] + mark, value)
    if isinstance(value, Mapping):
        return {
            _marked(key, starts, mark): _marked(item, starts, mark) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_marked(item, starts, mark) for item in value]
    return value


def _check_shown(text: str, messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises `BadInputError` for a content that was left out. An assistant's may be."""
    at = 0
    for number, message in enumerate(messages):
        content = (message["content"] or "").strip()
        if not content or message["role"] == "assistant":
            continue
        found = text.find(content, at)  # nearly always in the order of the messages
        if found >= 0:
            at = found + len(content)
        elif content not in text and msgspec.json.encode(content).decode()[1:-1] not in text:
            raise _no_place(number, message["role"])


def _no_place(number: int, role: str) -> BadInputError:
    return BadInputError(
        f"the chat template has no place for messages[{number}], of role {role!r}",
        param="messages",
    )
