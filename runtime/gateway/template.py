"""Chat templates: messages in the form that a model was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..protocol.errors import BadInputError, ProgramError


class ChatTemplate:
    """One template, compiled once. Raises `ProgramError` when there is none or it is not valid."""

    def __init__(self, source: str | None, named_tokens: Mapping[str, str] | None = None) -> None:
        if not source:
            raise ProgramError(
                "this model has no chat template: use it without roles, or give it one with the "
                "chat_template setting"
            )
        self.source = source
        self._named_tokens = dict(named_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ProgramError(
                f"the chat template is not valid: {error.message} (line {error.lineno})"
            ) from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The whole conversation as text. What the template itself objects to is a `BadInputError`
        with the template's own words."""
        try:
            return self._template.render(
                {
                    **self._named_tokens,
                    "messages": list(messages),
                    "add_generation_prompt": add_generation_prompt,
                    **variables,
                }
            )
        except _RefusedError as error:
            raise BadInputError(f"the chat template refuses this: {error}") from None
        except jinja2.TemplateError as error:
            raise BadInputError(f"the chat template failed: {error.message}") from None
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise BadInputError(f"the chat template failed: {error!r}") from None


class _RefusedError(Exception):
    pass


def _refuse(message: str) -> NoReturn:
    raise _RefusedError(message)


def _to_json(value: Any, **options: Any) -> str:
    """Like Jinja's own filter, but without escaping for HTML."""
    options.setdefault("ensure_ascii", False)
    return json.dumps(value, **options)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _GenerationTag],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks what an assistant wrote, for training: here it only lets pass."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
