"""Calls written as JSON objects, told of while they are still being written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import ClassVar

from .machine import NotACallError, Reads, ToolParser

Sink = Callable[[str], None]
_ARGUMENTS = ("arguments", "parameters")
_DEPTH = 200
_KEY_CHARACTERS = 256
_ENDS_LAYOUT = re.compile(r'[\["{}\]]')
_ENDS_STRING = re.compile(r'["\\]')


class JsonCallParser(ToolParser):
    """Reads ``{"name": …, "arguments": {…}}`` in any order of keys, alone or in arrays."""

    only_known_names: ClassVar[bool] = False
    """Whether an object is a call only when a tool of that name was offered."""
    opening: ClassVar[str | None] = None
    """What stands before the object of a call; ``None`` where a call is no object."""
    arguments_key: ClassVar[str] = "arguments"

    def _one_or_many(self, first: str) -> Reads[None]:
        """A call's object or an array of them, whose first character is ``first``."""
        if first == "{":
            yield from self._call()
            return
        if first != "[":
            raise NotACallError
        while True:
            character = yield from self._solid()
            if character == "{":
                yield from self._call()
            elif character == "]":
                self._drop()
                return
            elif character != ",":
                raise NotACallError

    def _call(self) -> Reads[None]:
        """One object, after its brace."""
        before = self.calls
        state = _CallState()
        yield from self._members(state)
        if self.calls == before:
            raise NotACallError
        if not state.told:
            self._argue("{}")
        self._end()

    def _members(self, state: _CallState) -> Reads[None]:
        character = yield from self._solid()
        while character != "}":
            if character == ",":
                character = yield from self._solid()
                continue
            if character != '"':
                raise NotACallError
            key = yield from self._string(_KEY_CHARACTERS)
            if (yield from self._solid()) != ":":
                raise NotACallError
            first = yield from self._solid()
            character = yield from self._member(key, first, state)

    def _member(self, key: str, first: str, state: _CallState) -> Reads[str]:
        """The value of a key, from its first character; returns the solid one after it."""
        if key == "name" and not state.named:
            if first != '"':
                raise NotACallError
            name = yield from self._string(_KEY_CHARACTERS)
            if (
                not name.isprintable()
                or not name
                or (self.only_known_names and name not in self.names)
            ):
                raise NotACallError
            state.named = True
            self._begin(name)
            if state.early:
                self._say(state, "".join(state.early))
            return (yield from self._solid())
        if key == "function" and first == "{" and not state.named and not state.inner:
            state.inner = True
            yield from self._members(state)
            return (yield from self._solid())
        if key not in _ARGUMENTS or state.told or state.early:
            return (yield from self._value(first, _ignore))
        if first != "{":  # null, or JSON inside a string
            parts: list[str] = []
            after = yield from self._value(first, parts.append)
            self._say(state, _unwrapped("".join(parts)))
            return after
        if not state.named:
            return (yield from self._value(first, state.early.append))
        state.told = True
        return (yield from self._value(first, self._argue))

    def _say(self, state: _CallState, text: str) -> None:
        if state.named:
            state.told = True
            self._argue(text)
        else:
            state.early.append(text)

    # --- JSON by the character --------------------------------------------------------------------

    def _value(self, first: str, sink: Sink) -> Reads[str]:
        """A value, given to ``sink``; returns the first solid character behind it."""
        if first in "{[":
            yield from self._container(first, sink)
        elif first == '"':
            sink(first)
            yield from self._quoted(sink)
        else:
            while first not in ",}]" and not first.isspace():
                sink(first)
                first = yield
            if not first.isspace():
                return first
        return (yield from self._solid())

    def _container(self, first: str, sink: Sink) -> Reads[None]:
        """An object or an array, to its last bracket. Only brackets and strings are looked at."""
        depth = 1
        sink(first)
        while depth:
            character = yield _ENDS_LAYOUT
            sink(character)
            if character == '"':
                yield from self._quoted(sink)
            elif character in "{[":
                depth += 1
                if depth > _DEPTH:
                    raise NotACallError
            elif character in "}]":
                depth -= 1

    def _quoted(self, sink: Sink, ends_run: re.Pattern[str] | None = _ENDS_STRING) -> Reads[None]:
        """A string after its first quote, to its last."""
        while True:
            character = yield ends_run
            sink(character)
            if character == "\\":
                sink((yield))
            elif character == '"':
                return

    def _string(self, most: int) -> Reads[str]:
        """The same, decoded. Raises `NotACallError` for a longer one or a bad escape."""
        parts = ['"']

        def sink(character: str) -> None:
            if len(parts) > most:
                raise NotACallError
            parts.append(character)

        yield from self._quoted(sink, None)  # where it fails must not depend on runs
        try:
            return str(json.loads("".join(parts), strict=False))
        except ValueError:
            raise NotACallError from None


class _CallState:
    """How far one call's object has been read."""

    __slots__ = ("early", "inner", "named", "told")

    def __init__(self) -> None:
        self.inner = False
        """Inside the object of ``"function": {…}``, which some write around a call."""
        self.named = False
        self.told = False
        self.early: list[str] = []
        """Arguments that came before the name."""


def _unwrapped(text: str) -> str:
    """Arguments that are no object: the text of a string, which is JSON again, and else none."""
    if text.startswith('"'):
        try:
            inner = str(json.loads(text, strict=False))
            inner.encode()
        except ValueError:  # of an escape, or of half a surrogate pair
            return text
        return inner if inner.strip() else "{}"
    return "{}" if text == "null" else text


def _ignore(_: str) -> None:
    pass
