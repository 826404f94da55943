"""Mistral: ``[TOOL_CALLS]`` and an array of calls, or, later, ``[TOOL_CALLS]name[ARGS]{…}``."""

from __future__ import annotations

from .json_calls import JsonCallParser
from .machine import NotACallError, Reads

OPEN, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralParser(JsonCallParser):
    marks = (OPEN, ID, ARGUMENTS)
    opening = OPEN + " ["
    short_ids = True

    def _read(self) -> Reads[None]:
        while True:
            yield from self._content_to(OPEN)
            try:
                first = yield from self._solid()
                if first in "[{":
                    yield from self._one_or_many(first)
                else:
                    yield from self._named(first)
            except NotACallError:
                if self._open:
                    self._end()
                else:
                    self._reread()

    def _named(self, first: str) -> Reads[None]:
        text, mark = yield from self._text_to("{", ID, ARGUMENTS)
        name = (first + text).strip()
        if mark == ID:
            _, mark = yield from self._text_to("{", ARGUMENTS)
        if not name or any(character.isspace() for character in name):
            raise NotACallError  # a name has no blanks
        if mark != "{" and (yield from self._solid()) != "{":
            raise NotACallError
        self._begin(name)
        yield from self._container("{", self._argue)
        self._end()
