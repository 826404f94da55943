"""Chat templates: messages in the form that a model was trained on."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
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
        self._skeletons: dict[tuple[tuple[str, ...], bool, bool], str | BadInputError] = {}
        self._remembered = 0
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
                    "tools": None,  # some templates ask whether they are none, not whether they are
                    "documents": None,
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

    def session(self) -> TemplateSession:
        """A conversation whose markers are asked for one message at a time."""
        return TemplateSession(self)

    def skeleton(self, roles: tuple[str, ...], generation: bool, padded: bool = False) -> str:
        """Messages of these roles rendered with `sentinel(0)`, `sentinel(1)`, … for contents.

        ``padded`` puts a blank on both sides of each, to see whether the template strips contents.
        """
        key = (roles, generation, padded)
        found = self._skeletons.get(key)
        if found is None:
            form = " {} " if padded else "{}"
            contents = [form.format(sentinel(i)) for i in range(len(roles))]
            messages = [{"role": r, "content": c} for r, c in zip(roles, contents)]
            try:
                found = self.render(messages, generation)
            except BadInputError as error:
                found = error
            self._remember(key, found)
        if isinstance(found, BadInputError):
            raise BadInputError(found.message)
        return found

    def _remember(
        self, key: tuple[tuple[str, ...], bool, bool], found: str | BadInputError
    ) -> None:
        size = _SKELETON_BYTES + (len(found) if isinstance(found, str) else 0) + 8 * len(key[0])
        if self._remembered + size > _MAX_REMEMBERED:
            self._skeletons.clear()
            self._remembered = 0
        self._skeletons[key] = found
        self._remembered += size


@dataclass(frozen=True, slots=True)
class Opening:
    """What a message begins with."""

    prefix: str
    """Text to append before its content. May hold special tokens."""
    rewrites: tuple[str | int, ...] | None = None
    """None while the template only appends. Else the whole conversation anew up to this message's
    content, its marker included: texts, and the numbers of messages whose contents stand there."""
    strips: bool = False
    """Whether the template would strip blanks around this message's content."""


class TemplateSession:
    """The markers of one conversation, message after message.

    Only roles are looked at: the template is rendered around sentinels, and what it writes before
    and after each is what the message is marked with. What has been handed out once is compared
    with every later rendering, so that a template which changes its mind is noticed.
    """

    __slots__ = ("_open", "_roles", "_template", "_written")

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._roles: tuple[str, ...] = ()
        self._written = ""
        self._open = False

    def fork(self) -> TemplateSession:
        """A copy that goes its own way."""
        child = TemplateSession(self._template)
        child._roles, child._written, child._open = self._roles, self._written, self._open
        return child

    def open(self, role: str) -> Opening:
        """Begin a message. Raises `BadInputError` in the template's words where it refuses the
        role, or when it does not put this message last."""
        if self._open:
            raise ProgramError(f"a {self._roles[-1]} message is still open; roles do not nest")
        number = len(self._roles)
        before = self._before(role)
        known = set(re.findall(_SENTINEL, before))
        if sentinel(number) in known:
            raise BadInputError(f"the chat template shows the content of a {role} message twice")
        roles = (*self._roles, role)
        rewrites = None
        if before.startswith(self._written) and not _has_content(before[len(self._written) :]):
            prefix = before[len(self._written) :]
        else:
            last = re.split(_SENTINEL, before)[-1]
            prefix = last.removeprefix(re.split(_SENTINEL, self._written)[-1])
            rewrites = tuple(_pieces(before))
        self._roles, self._written, self._open = roles, before + sentinel(number), True
        return Opening(prefix, rewrites, self._strips(role))

    def close(self) -> str:
        """End the message; the text that comes after its content whatever follows."""
        if not self._open:
            raise ProgramError("no message is open")
        suffix = self._after(self._roles)
        role = self._roles[-1]
        following = "user" if role == "assistant" else "assistant"
        if suffix:
            try:
                longer = self._after((*self._roles, following))
            except BadInputError:
                longer = suffix
            suffix = _common_start(suffix, longer)
        self._written += suffix
        self._open = False
        return suffix

    def _before(self, role: str) -> str:
        """The rendering up to the content of a next message.

        An assistant's opens as the template asks for an answer, if it does: that is what the model
        was trained to go on from. A template that merges a system message into the user's is
        rendered with both.
        """
        roles = (*self._roles, role)
        if role == "assistant" and self._roles:
            asked = self._asking()
            if asked is not None:
                return asked
        failure: BadInputError | None = None
        for more in ((), ("user",), ("assistant",)) if role != "assistant" else ((),):
            try:
                text = self._template.skeleton((*roles, *more), False)
            except BadInputError as error:
                failure = failure or error
                continue
            head, found, _ = text.partition(sentinel(len(self._roles)))
            if found and not self._contents_behind(text, head):
                return head
        if failure is None:
            failure = BadInputError(
                f"the chat template has no place for a {role} message after "
                f"{', '.join(self._roles) or 'nothing'}"
            )
        raise failure

    def _asking(self) -> str | None:
        """The rendering with a generation prompt; None where that changes nothing."""
        try:
            plain = self._template.skeleton(self._roles, False)
            asked = self._template.skeleton(self._roles, True)
        except BadInputError:
            return None
        return asked if asked != plain else None

    def _contents_behind(self, text: str, head: str) -> bool:
        """Whether an earlier message's content comes after the place where the next one begins."""
        return any(sentinel(i) in text and sentinel(i) not in head for i in range(len(self._roles)))

    def _after(self, roles: tuple[str, ...]) -> str:
        """What a rendering puts behind the open message's content, up to the next content; nothing
        where this message cannot stand last."""
        mine = sentinel(len(self._roles) - 1)
        try:
            text = self._template.skeleton(roles, False)
        except BadInputError:
            if roles != self._roles:
                raise
            return ""
        tail = text.partition(mine)[2]
        return re.split(_SENTINEL, tail)[0]

    def _strips(self, role: str) -> bool:
        roles = (*self._roles[:-1], role)
        mine = sentinel(len(roles) - 1)
        for more in ((), ("user",)):
            try:
                text = self._template.skeleton((*roles, *more), False, padded=True)
            except BadInputError:
                continue
            if mine in text:
                return f" {mine} " not in text
        return False


_SENTINEL = "\ue000[0-9]+\ue001"
_SKELETON_BYTES = 200
_MAX_REMEMBERED = 16 << 20


def sentinel(number: int) -> str:
    """Stands for the content of a message: private-use characters, which templates let pass."""
    return f"\ue000{number}\ue001"


def _common_start(left: str, right: str) -> str:
    count = 0
    for a, b in zip(left, right):
        if a != b:
            break
        count += 1
    return left[:count]


def _has_content(text: str) -> bool:
    return re.search(_SENTINEL, text) is not None


def _pieces(text: str) -> list[str | int]:
    """Texts and message numbers, in order, empty texts left out."""
    parts = re.split("\ue000([0-9]+)\ue001", text)
    pieces = [int(part) if i % 2 else part for i, part in enumerate(parts)]
    return [piece for piece in pieces if piece != ""]


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
