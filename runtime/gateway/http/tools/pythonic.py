"""Llama 4 and others: the answer is a list of Python calls, ``[name(key="value"), …]``."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from .machine import NotACallError, Reads, ToolParser

START, END = "<|python_start|>", "<|python_end|>"
_KEY = re.compile(r"[A-Za-z_]\w*")
_NAMES: dict[str, Any] = {"true": True, "false": False, "null": None}
_DEPTH = 60
_MOST_KEY = 128


class PythonicParser(ToolParser):
    """A call is told of when it is whole: only then is it certain that its values are literals."""

    marks = (START, END)

    def _read(self) -> Reads[None]:
        try:
            character = yield from self._solid()
            if character == START[0]:
                for expected in START[1:]:
                    if (yield) != expected:
                        raise NotACallError
                character = yield from self._solid()
            if character != "[":
                raise NotACallError
            while True:
                yield from self._call((yield from self._solid()))
                character = yield from self._solid()
                if character == ",":
                    continue
                if character != "]":
                    raise NotACallError
                break
        except NotACallError:
            yield from self._rest_is_content()
        self._drop()
        yield from self._content_to(END)
        self._drop()
        yield from self._rest_is_content()

    def _call(self, first: str) -> Reads[None]:
        name = first
        while True:
            if not any(known.startswith(name) for known in self.names):
                raise NotACallError
            character = yield
            if character == "(" and name in self.names:
                break
            name += character
        arguments: dict[str, Any] = {}
        character = yield from self._solid()
        while character != ")":
            text, _ = yield from self._text_to("=", most=_MOST_KEY)
            key = (character + text).strip()
            if not _KEY.fullmatch(key) or key in arguments:
                raise NotACallError
            value, character = yield from self._value()
            arguments[key] = _literal(value)
            if character == ",":
                character = yield from self._solid()
        text = _as_json(arguments)
        self._begin(name)
        self._argue(text)
        self._end()

    def _value(self) -> Reads[tuple[str, str]]:
        """The source of a value, and the comma or bracket behind it."""
        parts: list[str] = []
        depth = 0
        while True:
            character = yield
            if depth == 0 and character in ",)":
                return "".join(parts), character
            parts.append(character)
            if character in "([{":
                depth += 1
                if depth > _DEPTH:
                    raise NotACallError
            elif character in ")]}":
                depth -= 1
            elif character in "'\"":
                while (inner := (yield)) != character:
                    parts.append("\\n" if inner == "\n" else inner)
                    if inner == "\\":
                        parts.append((yield))
                parts.append(inner)


class _JsonNames(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_NAMES[node.id]) if node.id in _NAMES else node


def _literal(source: str) -> Any:
    """The value of a Python (or JSON) literal. Raises `NotACallError` for anything else."""
    try:
        tree = ast.parse(source.strip(), mode="eval")
        return ast.literal_eval(_JsonNames().visit(tree))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        raise NotACallError from None


def _as_json(arguments: dict[str, Any]) -> str:
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()  # fails for half of a surrogate pair, which is no JSON either
        return text
    except (ValueError, TypeError, RecursionError):
        raise NotACallError from None
