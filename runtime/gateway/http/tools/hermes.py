"""Hermes and Qwen: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` between other text."""

from __future__ import annotations

from .json_calls import JsonCallParser
from .machine import NotACallError, Reads

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(JsonCallParser):
    marks = (OPEN, CLOSE)
    opening = OPEN + "\n"

    def _read(self) -> Reads[None]:
        marks: tuple[str, ...] = (OPEN,)
        while True:
            if (yield from self._content_to(*marks)) == CLOSE:
                self._drop()
                marks = (OPEN,)
                continue
            before = self.calls
            try:
                yield from self._one_or_many((yield from self._solid()))
            except NotACallError:
                if self._open:
                    yield from self._skip_to(CLOSE)
                    self._end()
                else:
                    self._reread()
            marks = (OPEN, CLOSE) if self.calls > before else (OPEN,)
