"""Llama 3: the answer is ``{"name": …, "parameters": {…}}``, several with ``;`` between them."""

from __future__ import annotations

from .json_calls import JsonCallParser
from .machine import NotACallError, Reads

TAG = "<|python_tag|>"


class Llama3Parser(JsonCallParser):
    """Objects at the start of an answer or behind the tag. They have no mark of their own, so one
    with a name that no tool has is content."""

    marks = (TAG,)
    opening = ""
    arguments_key = "parameters"
    only_known_names = True

    def _read(self) -> Reads[None]:
        while True:
            try:
                character = yield from self._solid()
                while character == "{":
                    yield from self._call()
                    character = yield from self._solid()
                    if character == ";":
                        character = yield from self._solid()
            except NotACallError:
                if self._open:
                    self._end()
            if self._held:
                self._unread()
            yield from self._content_to(TAG)
            self._drop()
