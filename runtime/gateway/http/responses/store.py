"""Responses that were given, for as long as there is room: to be read again and gone on from."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from ... import origin

_encode = msgspec.json.Encoder().encode
_Key = tuple[bytes, str]


@dataclass(frozen=True, slots=True)
class Stored:
    """``body`` is the response as its client sees it, ``items`` the input with all that came
    before it. ``size`` is in bytes."""

    body: dict[str, Any]
    items: list[dict[str, Any]]
    size: int

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """What a next response goes on from."""
        return [*self.items, *self.body["output"]]


class ResponseStore:
    """Forgets what was used longest ago. Each API key sees its own only."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._bytes = 0
        self._kept: OrderedDict[_Key, Stored] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, body: dict[str, Any], items: list[dict[str, Any]]) -> None:
        """Keep a response under its id, in the place of what it was before. One that is larger
        than all the room there is, is not kept."""
        self.drop(body["id"])
        size = len(_encode(body)) + len(_encode(items))
        if size > self._most_bytes:
            return
        self._kept[_key(body["id"])] = Stored(body, items, size)
        self._bytes += size
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= oldest.size

    def get(self, name: str) -> Stored | None:
        found = self._kept.get(_key(name))
        if found is not None:
            self._kept.move_to_end(_key(name))
        return found

    def drop(self, name: str) -> bool:
        """Whether there was one."""
        found = self._kept.pop(_key(name), None)
        if found is not None:
            self._bytes -= found.size
        return found is not None


def _key(name: str) -> _Key:
    return origin.current().owner, name
