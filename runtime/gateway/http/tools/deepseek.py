"""DeepSeek V3, R1 and V3.1: calls between tokens with full-width bars."""

from __future__ import annotations

from .json_calls import JsonCallParser
from .machine import NotACallError, Reads

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
_KIND = "function"
_FENCE = "```"


class DeepSeekParser(JsonCallParser):
    """``name<｜tool▁sep｜>{…}`` (V3.1), or ``function<｜tool▁sep｜>name`` and a fenced block."""

    marks = (CALLS, CALLS_END, CALL, CALL_END, SEPARATOR)

    def _read(self) -> Reads[None]:
        marks: tuple[str, ...] = (CALLS, CALL)
        while True:
            mark = yield from self._content_to(*marks)
            if mark != CALL:
                self._drop()
                marks = (CALLS, CALL) if mark == CALLS_END else (CALLS_END, CALL_END, CALL, CALLS)
                continue
            try:
                fenced = yield from self._named()
                marks = (CALL_END, CALLS_END, CALL, *([_FENCE] if fenced else []))
            except NotACallError:
                if self._open:
                    self._end()
                else:
                    self._reread()

    def _named(self) -> Reads[bool]:
        """A call after its mark; returns whether it stands in a fenced block."""
        name, _ = yield from self._text_to(SEPARATOR)
        name = name.strip()
        old = name == _KIND
        fence = ""
        if old:
            name, _ = yield from self._text_to("\n")
            name = name.strip()
            fence, _ = yield from self._text_to("{")
            if fence.strip() not in ("```json", "```", ""):
                raise NotACallError
        elif (yield from self._solid()) != "{":
            raise NotACallError
        if not name:
            raise NotACallError
        self._begin(name)
        yield from self._container("{", self._argue)
        self._end()
        return bool(fence.strip())
