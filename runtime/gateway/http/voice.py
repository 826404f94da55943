"""How one request's answers are to be read: which parsers, from where on, in which form."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from ..tokenizer import Tokenizer
from .reasoning import ReasoningParser, ThinkTags, begins_inside, think_tags
from .spoken import Speech
from .state import Live
from .tools.machine import ToolParser
from .tools.offered import Offer
from .tools.registry import parser_class


@dataclass(frozen=True, slots=True)
class Voice:
    """``given``: what the prompt already holds of the answer."""

    tags: ThinkTags | None = None
    inside: bool = False
    parser: type[ToolParser] | None = None
    offer: Offer | None = None
    given: str = ""

    def speech(self) -> Speech:
        """Parsers for one sample."""
        reasoning = None if self.tags is None else ReasoningParser(self.tags, self.inside)
        tools = None
        if self.parser is not None and self.offer is not None:
            tools = self.parser(self.offer.names, self.offer.most)
        return Speech(reasoning, tools, self.given)

    def hides_marks(self, tokenizer: Tokenizer) -> bool:
        """Whether a mark that is looked for is a special token, so that these must be shown."""
        marks = [] if self.tags is None else [self.tags.start, self.tags.end]
        if self.parser is not None:
            marks += self.parser.marks
        return any(tokenizer.id(mark) in tokenizer.special_ids for mark in marks)

    def new_call_id(self) -> str:
        if self.parser is not None and self.parser.short_ids:
            return secrets.token_hex(5)[:9]
        return f"call_{secrets.token_hex(12)}"


def voice_of(live: Live, opening: str, offer: Offer | None = None, separate: bool = True) -> Voice:
    """``opening``: how the prompt ends. ``separate``: whether thinking is parted from content."""
    template = live.executor.tokenizer.chat_template
    tags = think_tags(live.reasoning_parser, template) if separate else None
    parser = None if offer is None else parser_class(live.tool_parser, template)
    inside = tags is not None and begins_inside(tags, opening)
    return Voice(tags, inside, parser, offer if parser is not None else None)
