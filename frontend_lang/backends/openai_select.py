"""`select` on an OpenAI-compatible server: by scores where it gives them, else by asking."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

from ramet.runtime.program.choices import choose
from ramet.runtime.program.executor import SelectResult
from ramet.runtime.program.instructions import ChoicesMethod
from ramet.runtime.protocol import (
    BackendError,
    BadInputError,
    ChoiceScore,
    ContextLengthError,
    MetaInfo,
    ProgramError,
    SamplingParams,
)

from .openai_http import HttpError

if TYPE_CHECKING:
    from .openai import OpenAIContext

Scored = list[tuple[str, float | None, int]]
"""(token, log-prob, where the token begins in the text, in characters)"""


async def select(
    context: OpenAIContext,
    choices: list[str],
    method: ChoicesMethod,
    boundary: Literal["exact", "plain"],
    name: str | None,
) -> SelectResult:
    """Score the choices by echoed completions if the server can; otherwise have it answer with one.

    Asking knows no log-probs: it cannot honour the unconditional method, and its meta info has no
    scores. Raises `ProgramError` when the answer is none of the choices.
    """
    executor = context.executor
    if not context.chats and executor.can_echo is not False:
        try:
            result = await _score(context, choices, method, boundary)
        except ContextLengthError:
            raise
        except (BadInputError, HttpError, _NoEchoError):
            if executor.can_echo:
                raise
            executor.can_echo = False
        else:
            executor.can_echo = True
            return result
    if method == "unconditional_likelihood_normalized":
        raise ProgramError(
            f"select {name!r}: {method} needs log-probs of the prompt, which "
            f"{executor.client.base_url} does not give"
        )
    return await _ask(context, choices, name)


class _NoEchoError(BackendError):
    """The server answered, but without log-probs of the prompt."""


# --- scoring --------------------------------------------------------------------------------------


async def _score(
    context: OpenAIContext, choices: list[str], method: ChoicesMethod, boundary: str
) -> SelectResult:
    text = context.raw
    scored = [await _echo(context, text + choice) for choice in choices]
    start = len(text)
    if boundary == "exact" and text:
        prefix = await _echo(context, text)
        first = _common([[token for token, _, _ in row] for row in [prefix, *scored]])
        firsts = [max(first, 1)] * len(scored)
    else:
        firsts = [sum(1 for _, _, at in row if at < start) for row in scored]
    rows = [row[first:] for row, first in zip(scored, firsts)]
    logprobs = [[value or 0.0 for _, value, _ in row] for row in rows]
    counts = [sum(1 for token, _, at in row if at + len(token) > start) for row in rows]
    alone = None
    if method == "unconditional_likelihood_normalized":
        alone = [[value for _, value, _ in await _echo(context, choice)] for choice in choices]
    decision = choose(method, logprobs, alone, counts)
    scores = [
        ChoiceScore(
            text=choice,
            input_token_logprobs=[(value, -1, token) for token, value, _ in row],
            normalized_prompt_logprobs=decision.normalized[index],
            normalized_unconditional_prompt_logprobs=(
                decision.normalized_unconditional[index]
                if decision.normalized_unconditional is not None
                else None
            ),
        )
        for index, (choice, row) in enumerate(zip(choices, rows))
    ]
    meta = MetaInfo(choices=scores, greedy_logprob_matrix=decision.greedy_matrix)
    return SelectResult(decision.index, meta)


async def _echo(context: OpenAIContext, text: str) -> Scored:
    """The tokens of a text with their log-probs, as the server's completions echo them."""
    executor = context.executor
    body: dict[str, Any] = {
        "model": await executor.model(),
        "prompt": text,
        "max_tokens": 0,
        "echo": True,
        "logprobs": 1,
        "temperature": 0,
    }
    reply = await executor.client.post("/completions", body)
    try:
        found = reply["choices"][0]["logprobs"]
        tokens, values = list(found["tokens"]), list(found["token_logprobs"])
    except (KeyError, IndexError, TypeError):
        raise _NoEchoError("no log-probs of the prompt in the reply") from None
    if not tokens or len(values) != len(tokens) or "".join(tokens) != text:
        raise _NoEchoError("the reply does not echo the prompt")
    at = 0
    out: Scored = []
    for token, value in zip(tokens, values):
        out.append((token, value, at))
        at += len(token)
    return out


def _common(rows: list[list[str]]) -> int:
    """How many tokens all rows begin with."""
    shortest = min(len(row) for row in rows)
    for index in range(shortest):
        if any(row[index] != rows[0][index] for row in rows):
            return index
    return shortest


# --- asking ---------------------------------------------------------------------------------------


async def _ask(context: OpenAIContext, choices: list[str], name: str | None) -> SelectResult:
    executor = context.executor
    distinct = list(dict.fromkeys(choices))
    answer = None
    if context.chats and executor.can_constrain is not False:
        try:
            answer = await _constrained(context, distinct)
            executor.can_constrain = True
        except ContextLengthError:
            raise
        except BadInputError:
            if executor.can_constrain:
                raise
            executor.can_constrain = False
    if answer is None:
        answer = await _free(context, distinct)
    index = _match(answer, choices)
    if index is None:
        raise ProgramError(
            f"select {name!r}: the server answered {answer[:80]!r}, which is none of {choices!r}"
        )
    return SelectResult(index, MetaInfo())


def _question(context: OpenAIContext, choices: list[str]) -> list[dict[str, str]]:
    """The chat so far, and a last message that asks for one of the choices."""
    messages = context.chat()
    if context.content:
        messages.append({"role": "assistant", "content": context.content})
    listed = json.dumps(choices, ensure_ascii=False)
    what = "Continue your last message with" if context.content else "Answer with"
    ask = f"{what} exactly one of these, and nothing else: {listed}"
    if messages and messages[-1]["role"] == "user":
        messages[-1] = {"role": "user", "content": f"{messages[-1]['content']}\n\n{ask}"}
    else:
        messages.append({"role": "user", "content": ask})
    return messages


async def _constrained(context: OpenAIContext, choices: list[str]) -> str | None:
    schema = {
        "type": "object",
        "properties": {"answer": {"type": "string", "enum": choices}},
        "required": ["answer"],
        "additionalProperties": False,
    }
    body = {
        "model": await context.executor.model(),
        "messages": _question(context, choices),
        "temperature": 0,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "choice", "strict": True, "schema": schema},
        },
    }
    text = (await context.complete("/chat/completions", body, 1))[0].text
    try:
        return str(json.loads(text)["answer"])
    except (ValueError, KeyError, TypeError):
        return None  # the server takes the schema, but does not keep to it


async def _free(context: OpenAIContext, choices: list[str]) -> str:
    limit = 16 + 2 * max(len(choice) for choice in choices)
    if context.chats:
        body = {
            "model": await context.executor.model(),
            "messages": _question(context, choices),
            "temperature": 0,
            "max_tokens": limit,
        }
        return (await context.complete("/chat/completions", body, 1))[0].text
    path, body = context.request(SamplingParams(temperature=0.0, max_new_tokens=limit))
    body["model"] = await context.executor.model()
    return (await context.complete(path, body, 1))[0].text


def _match(answer: str, choices: list[str]) -> int | None:
    """The choice that the answer is, or else the longest one that it begins with."""
    plain = answer.strip().strip("\"'`").strip()
    for index, choice in enumerate(choices):
        if plain == choice.strip():
            return index
    fits = [i for i, c in enumerate(choices) if c.strip() and plain.startswith(c.strip())]
    return max(fits, key=lambda i: len(choices[i].strip()), default=None)
