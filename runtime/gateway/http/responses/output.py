"""An answer as it grows: its items, and the events that tell of each change."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from typing import Any

from ..spoken import Spoken, Thought
from ..tools.events import CallArguments, Content

Item = dict[str, Any]
Event = dict[str, Any]

_NO_LOGPROBS: list[dict[str, Any]] = []


class Output:
    """``items`` is the answer so far. The last one is open until another begins or all ends.
    ``new_call_id`` names calls as the model's family does."""

    def __init__(self, new_call_id: Callable[[], str]) -> None:
        self.items: list[Item] = []
        self.thought = ""
        """All of the thinking."""
        self._new_call_id = new_call_id
        self._events: list[Event] = []
        self._pieces: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def push(
        self, spoken: Iterable[Spoken], logprobs: list[dict[str, Any]] = _NO_LOGPROBS
    ) -> list[Event]:
        """What has been said since. ``logprobs`` are those of its tokens; they go to its text."""
        for piece in spoken:
            if isinstance(piece, Content):
                self._text(piece.text, logprobs)
                logprobs = _NO_LOGPROBS
            elif isinstance(piece, Thought):
                self._thought(piece.text)
            elif isinstance(piece, CallArguments):
                self._arguments(piece.text)
            else:
                self._call(piece.name)
        return self._taken()

    def finish(self, status: str) -> list[Event]:
        """No more comes; ``status`` is completed or incomplete. An answer has at least one item."""
        if not self.items:
            self._text("", _NO_LOGPROBS)
        self._close(status)
        return self._taken()

    # --- one method a kind of item ---

    def _text(self, text: str, logprobs: list[dict[str, Any]]) -> None:
        part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": []}
        self._open("message", {**part, "logprobs": []}, role="assistant")
        self._logprobs += logprobs
        if text:
            self._pieces.append(text)
            self._say("output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _thought(self, text: str) -> None:
        self._open("reasoning", {"type": "reasoning_text", "text": ""}, summary=[])
        self._pieces.append(text)
        self._say("reasoning_text.delta", content_index=0, delta=text)

    def _call(self, name: str) -> None:
        self._close("completed")
        self._add(
            {
                "id": f"fc_{secrets.token_hex(16)}",
                "type": "function_call",
                "status": "in_progress",
                "call_id": self._new_call_id(),
                "name": name,
                "arguments": "",
            }
        )

    def _arguments(self, text: str) -> None:
        self._pieces.append(text)
        self._say("function_call_arguments.delta", delta=text)

    # --- beginnings and ends ---

    def _open(self, kind: str, part: dict[str, Any], **fields: Any) -> None:
        """Begin an item of this kind with an empty part, unless the open one is of it already."""
        last = self.items[-1] if self.items else None
        if last is not None and last["type"] == kind and last["status"] == "in_progress":
            return
        self._close("completed")
        prefix = "msg" if kind == "message" else "rs"
        name = f"{prefix}_{secrets.token_hex(16)}"
        self._add({"id": name, "type": kind, "status": "in_progress", **fields, "content": []})
        self._say("content_part.added", content_index=0, part=part)

    def _add(self, item: Item) -> None:
        self.items.append(item)
        self._tell("output_item.added", output_index=len(self.items) - 1, item={**item})

    def _close(self, status: str) -> None:
        item = self.items[-1] if self.items else None
        if item is None or item["status"] != "in_progress":
            return
        item["status"] = status
        text, logprobs = "".join(self._pieces), self._logprobs
        self._pieces, self._logprobs = [], []
        if item["type"] == "function_call":
            item["arguments"] = text
            self._say("function_call_arguments.done", name=item["name"], arguments=text)
        elif item["type"] == "reasoning":
            self.thought += text
            part: dict[str, Any] = {"type": "reasoning_text", "text": text}
            self._say("reasoning_text.done", content_index=0, text=text)
            self._part_done(item, part)
        else:
            part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
            self._say("output_text.done", content_index=0, text=text, logprobs=logprobs)
            self._part_done(item, part)
        self._tell("output_item.done", output_index=len(self.items) - 1, item=item)

    def _part_done(self, item: Item, part: dict[str, Any]) -> None:
        item["content"] = [part]
        self._say("content_part.done", content_index=0, part=part)

    def _say(self, kind: str, **fields: Any) -> None:
        """An event of the last item."""
        place = len(self.items) - 1
        self._tell(kind, item_id=self.items[place]["id"], output_index=place, **fields)

    def _tell(self, kind: str, **fields: Any) -> None:
        self._events.append({"type": f"response.{kind}", **fields})

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events
