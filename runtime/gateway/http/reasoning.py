"""Thinking aloud: what a model writes between ``<think>`` and ``</think>`` before its answer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """How a family of models marks its thinking. ``assumed``: an answer begins with it even where
    neither the prompt nor the answer has the opening tag."""

    start: str
    end: str
    assumed: bool = False


_THINK = ThinkTags("<think>", "</think>")
_R1 = ThinkTags("<think>", "</think>", assumed=True)
_KIMI = ThinkTags("◁think▷", "◁/think▷")
_MISTRAL = ThinkTags("[THINK]", "[/THINK]")
_SEED = ThinkTags("<seed:think>", "</seed:think>")

FAMILIES: dict[str, ThinkTags] = {
    "think": _THINK,
    "qwen3": _THINK,
    "qwen3-thinking": _R1,
    "deepseek-r1": _R1,
    "deepseek-v3": _THINK,
    "glm45": _THINK,
    "step3": _R1,
    "kimi": _KIMI,
    "mistral": _MISTRAL,
    "seed-oss": _SEED,
}
"""By the names that people know from other servers."""

_SIGNS = (_THINK, _KIMI, _MISTRAL, _SEED)


def think_tags(setting: str, template: str | None) -> ThinkTags | None:
    """By ``--reasoning-parser``: a name, ``none``, or ``auto`` for what the template mentions."""
    if setting == "none":
        return None
    if setting != "auto":
        return FAMILIES[setting.replace("_", "-")]
    return next((tags for tags in _SIGNS if template and tags.end in template), None)


def begins_inside(tags: ThinkTags, opening: str) -> bool:
    """Whether an answer begins in the middle of the thinking. ``opening``: what the prompt ends
    with, from the last message on: some templates open the thinking, others open and close it."""
    start, end = opening.rfind(tags.start), opening.rfind(tags.end)
    return start > end if max(start, end) >= 0 else tags.assumed


class _State(Enum):
    UNDECIDED = auto()
    """Blanks and perhaps a part of the opening tag."""
    EXPECTED = auto()
    """The same, but what is no tag is thinking: the prompt has opened it."""
    OPENED = auto()
    """Blanks behind the opening tag."""
    INSIDE = auto()
    CLOSED = auto()
    """Blanks behind the closing tag."""
    AFTER = auto()


class ReasoningParser:
    """Parts the pieces of one answer into thinking and the rest. Any split of a text gives the same
    two texts. Blanks around the thinking belong to neither."""

    def __init__(self, tags: ThinkTags, inside: bool) -> None:
        self._tags = tags
        self._held = ""
        self._state = _State.EXPECTED if inside else _State.UNDECIDED

    @property
    def thinking(self) -> bool:
        """Whether the closing tag is still to come, as far as is known."""
        return self._state in (_State.EXPECTED, _State.OPENED, _State.INSIDE)

    def push(self, text: str) -> tuple[str, str]:
        """New thinking, and new text of the answer."""
        self._held += text
        thought = answer = ""
        if self._state in (_State.UNDECIDED, _State.EXPECTED) and not self._decided():
            return "", ""
        if self._state is _State.OPENED:
            self._skip_blanks(_State.INSIDE)
        if self._state is _State.INSIDE:
            thought = self._thought()
        if self._state is _State.CLOSED:
            self._skip_blanks(_State.AFTER)
        if self._state is _State.AFTER:
            answer, self._held = self._held, ""
        return thought, answer

    def finish(self) -> tuple[str, str]:
        """What is left when no more text comes."""
        held, self._held = self._held, ""
        if self._state is _State.EXPECTED:
            held = held.lstrip()
        return (held.rstrip(), "") if self.thinking else ("", held)

    def _decided(self) -> bool:
        bare, start = self._held.lstrip(), self._tags.start
        if bare.startswith(start):
            self._held = bare[len(start) :]
            self._state = _State.OPENED
        elif start.startswith(bare):
            return False
        else:
            self._state = _State.OPENED if self._state is _State.EXPECTED else _State.AFTER
        return True

    def _skip_blanks(self, then: _State) -> None:
        self._held = self._held.lstrip()
        if self._held:
            self._state = then

    def _thought(self) -> str:
        """What is surely thinking: not the closing tag, nor blanks before it."""
        end = self._tags.end
        thought, found, rest = self._held.partition(end)
        if found:
            self._held = rest
            self._state = _State.CLOSED
            return thought.rstrip()
        part = next(n for n in range(len(end) - 1, -1, -1) if self._held.endswith(end[:n]))
        thought = self._held[: len(self._held) - part].rstrip()
        self._held = self._held[len(thought) :]
        return thought
