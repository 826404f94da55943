"""One answer as it is spoken: thinking, content and calls, from pieces of its text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from .reasoning import ReasoningParser
from .tools.events import CallArguments, CallBegin, Content
from .tools.machine import ToolParser


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of the thinking before the answer."""

    text: str


Spoken: TypeAlias = Thought | Content | CallBegin | CallArguments


class Speech:
    """Both parsers of one sample, in a row. Pieces give the same as the whole text at once.
    ``given``: a beginning of the answer that the prompt holds already."""

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        tools: ToolParser | None = None,
        given: str = "",
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._early: list[Spoken] = []
        if given:
            self._early = self.push(given)

    @property
    def called(self) -> bool:
        """Whether a tool has been called."""
        return self._tools is not None and self._tools.calls > 0

    def push(self, text: str) -> list[Spoken]:
        """What a piece of text makes certain."""
        if self._reasoning is None and self._tools is None:
            return [Content(text)] if text else []
        found, self._early = self._early, []
        if self._reasoning is None:
            return found + self._answered(text)
        thought, answer = self._reasoning.push(text)
        if thought:
            found.append(Thought(thought))
        return found + self._answered(answer)

    def finish(self) -> list[Spoken]:
        """What is left when no more text comes."""
        found, self._early = self._early, []
        if self._reasoning is not None:
            thought, answer = self._reasoning.finish()
            if thought:
                found.append(Thought(thought))
            found += self._answered(answer)
        if self._tools is not None:
            found += self._tools.finish()
        return found

    def _answered(self, text: str) -> list[Spoken]:
        if not text:
            return []
        if self._tools is None:
            return [Content(text)]
        return list(self._tools.push(text))


@dataclass(slots=True)
class Message:
    """A whole answer. ``calls`` holds names and arguments."""

    content: str
    thought: str
    calls: list[tuple[str, str]]


def heard(speech: Speech, text: str) -> Message:
    """A whole text by a fresh ``speech``."""
    message = Message("", "", [])
    for item in [*speech.push(text), *speech.finish()]:
        if isinstance(item, Content):
            message.content += item.text
        elif isinstance(item, Thought):
            message.thought += item.text
        elif isinstance(item, CallBegin):
            message.calls.append((item.name, ""))
        else:
            name, arguments = message.calls[item.index]
            message.calls[item.index] = name, arguments + item.text
    return message
