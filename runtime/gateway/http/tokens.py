"""``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ..logprobs import token_text
from .answers import json_answer
from .asked import ask
from .errors import bad
from .forms import DetokenizeForm, TokenizeForm
from .prompts import ids_of_prompt
from .reading import read_form
from .state import HttpState
from .tools.offered import read_offer


async def tokenize(state: HttpState, request: Request) -> Response:
    """Raises `HttpError` and `RametError`."""
    form = await read_form(request, TokenizeForm, state.limits.body_bytes)
    live = state.need_model(form.model)
    executor = live.executor
    if (form.prompt is None) == (form.messages is None):
        raise bad("give either prompt or messages", "prompt")
    if form.messages is not None:
        go_on = bool(form.continue_final_message)
        answer = form.add_generation_prompt is not False and not go_on
        asked = await ask(
            live,
            form.messages,
            offer=read_offer(form.tools, None, None),
            answer=answer,
            go_on=go_on,
            variables=form.chat_template_kwargs,
            template=form.chat_template,
        )
        ids = asked.ids
    elif form.prompt:
        start = form.add_special_tokens is not False
        ids = await ids_of_prompt(executor, form.prompt, start=start)
    else:
        ids = []
    tokens = [int(token) for token in ids]
    strings = None
    if form.return_token_strs:
        strings = [token_text(executor.tokenizer, token) for token in tokens]
    return json_answer(
        {
            "count": len(tokens),
            "max_model_len": executor.context_length,
            "tokens": tokens,
            "token_strs": strings,
        }
    )


async def detokenize(state: HttpState, request: Request) -> Response:
    """Raises `HttpError` and `RametError`."""
    form = await read_form(request, DetokenizeForm, state.limits.body_bytes)
    live = state.need_model(form.model)
    text = live.executor.tokenizer.decode(form.tokens, skip_special=bool(form.skip_special_tokens))
    return json_answer({"prompt": text, "text": text})
