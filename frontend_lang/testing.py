"""A backend for unit tests of prompt programs: answers from a script, no model."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from ramet.runtime.program.executor import GenResult, OnDelta, SelectResult
from ramet.runtime.program.instructions import ChoicesMethod
from ramet.runtime.protocol import (
    BadInputError,
    ChoiceScore,
    FinishReason,
    MetaInfo,
    ProgramError,
    SamplingParams,
)

from .backends.local import LocalBackend

Answer = str | int | Sequence[Any] | Exception | Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Call:
    """One thing that a program asked for. ``choices`` is there for a `select`, ``sampling`` for a
    `gen`. ``prompt`` is the whole text so far, with the markers of the scripted chat template."""

    kind: Literal["gen", "select", "warm"]
    name: str | None
    prompt: str
    sampling: SamplingParams | None = None
    choices: tuple[str, ...] = ()
    method: ChoicesMethod | None = None


@dataclass(slots=True)
class _Script:
    answers: dict[str | None, Answer]
    default: Answer | None
    delay: float
    calls: list[Call] = field(default_factory=lambda: list[Call]())
    used: dict[str | None, int] = field(default_factory=lambda: dict[str | None, int]())
    open_contexts: int = 0

    async def answer(self, call: Call) -> Any:
        """The next answer to a call; functions are called in a thread."""
        if self.delay > 0:
            await asyncio.sleep(self.delay)
        found = self.answers.get(call.name, self.default)
        if found is None:
            known = ", ".join(repr(name) for name in self.answers) or "none"
            raise ProgramError(
                f"the script has no answer for {call.name!r} (answers there are: {known})"
            )
        if isinstance(found, (list, tuple)):
            index = self.used.get(call.name, 0)
            found = list(cast("Sequence[Any]", found))
            if index >= len(found):
                raise ProgramError(f"the script has only {len(found)} answers for {call.name!r}")
            self.used[call.name] = index + 1
            found = found[index]
        if callable(found):
            found = await asyncio.to_thread(found, call if _wants_call(found) else call.prompt)
        if isinstance(found, Exception):
            raise found
        return found


class ScriptedBackend(LocalBackend):
    """Runs programs against scripted answers.

    ``answers`` maps a variable's name (None for unnamed generations) to a string; to a list, whose
    entries are used up in the order in which the calls come; to an exception, which is raised; or
    to a function of the prompt's text (of the `Call`, when its parameter is named ``call``). The
    answer to a `select` is one of the choices, or its index. ``default`` answers every other name.
    ``delay`` is how many seconds each answer takes. ``calls`` records what was asked, in order.
    """

    def __init__(
        self,
        answers: Mapping[str | None, Answer] | None = None,
        *,
        default: Answer | None = None,
        delay: float = 0.0,
    ) -> None:
        self._script = _Script(dict(answers or {}), default, delay)
        super().__init__(_ScriptedExecutor(self._script))

    @property
    def calls(self) -> list[Call]:
        """What was asked so far, in the order in which it was asked."""
        return self._script.calls

    @property
    def open_contexts(self) -> int:
        """Branches that are still held: 0 once every program has ended."""
        return self._script.open_contexts

    def flush_cache(self) -> None:
        """There is none."""

    def server_info(self) -> dict[str, Any]:
        """Says that this is a script."""
        return {"model": "scripted", "calls": len(self.calls)}


class _ScriptedExecutor:
    def __init__(self, script: _Script) -> None:
        self._script = script

    def open(self, program: int, cache_salt: str | None = None) -> _ScriptedContext:
        del program, cache_salt
        return _ScriptedContext(self._script, "")


class _ScriptedContext:
    """A stream's text. Chat markers are ``<role>`` and ``</role>``."""

    def __init__(self, script: _Script, text: str) -> None:
        self._script = script
        self._text = text
        self._role = ""
        self._closed = False
        script.open_contexts += 1

    def append(self, text: str) -> None:
        self._text += text

    def role_begin(self, role: str) -> str:
        self._role = role
        return self._marker(f"<{role}>")

    def role_end(self, role: str) -> str:
        return self._marker(f"</{role}>\n")

    def fork(self) -> _ScriptedContext:
        return _ScriptedContext(self._script, self._text)

    async def gen(
        self, sampling: SamplingParams, name: str | None, on_delta: OnDelta | None
    ) -> list[GenResult]:
        call = Call("gen", name, self._text, sampling)
        self._script.calls.append(call)
        results: list[GenResult] = []
        for _ in range(sampling.n):
            answer = await self._script.answer(call)
            if not isinstance(answer, str):
                raise BadInputError(f"the answer for {name!r} must be a string, not {answer!r}")
            results.append(_cut(answer, sampling))
        if on_delta is not None:
            for piece in re.findall(r"\s*\S+|\s+$", results[0].text):
                on_delta(piece, None)
                await asyncio.sleep(0)
        self._text += results[0].text
        return results

    async def select(
        self,
        choices: Sequence[str],
        method: ChoicesMethod,
        boundary: Literal["exact", "plain"],
        name: str | None,
    ) -> SelectResult:
        del boundary
        call = Call("select", name, self._text, None, tuple(choices), method)
        self._script.calls.append(call)
        answer = await self._script.answer(call)
        if isinstance(answer, int) and 0 <= answer < len(choices):
            index = answer
        elif answer in choices:
            index = list(choices).index(str(answer))
        else:
            raise BadInputError(f"the answer {answer!r} for {name!r} is none of {list(choices)!r}")
        self._text += choices[index]
        scores = [
            ChoiceScore(text, [], 0.0 if i == index else -1.0) for i, text in enumerate(choices)
        ]
        return SelectResult(index, MetaInfo(choices=scores))

    def explain_next(self) -> None:
        """A script has no cache."""

    async def warm(self) -> None:
        self._script.calls.append(Call("warm", None, self._text))

    def warnings(self) -> list[tuple[str, str]]:
        return []

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._script.open_contexts -= 1

    def _marker(self, marker: str) -> str:
        self._text += marker
        return marker


def _cut(text: str, sampling: SamplingParams) -> GenResult:
    """The answer up to the first stop string, with plausible counts."""
    ends = [(text.find(stop), stop) for stop in sampling.stop if stop in text]
    matched = None
    if ends:
        end, matched = min(ends)
        text = text[:end]
    tokens = len(text.split()) + 1
    reason = FinishReason("stop", matched)
    return GenResult(text, MetaInfo(finish_reason=reason, completion_tokens=tokens))


def _wants_call(function: Callable[..., Any]) -> bool:
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return False
    return bool(parameters) and parameters[0] == "call"
