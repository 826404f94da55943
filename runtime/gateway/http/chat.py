"""``/v1/chat/completions``."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from .answers import Events, json_answer, while_connected
from .asked import ask
from .chat_answer import ChatAnswer
from .constrained import constraint_of
from .forms import ChatForm
from .opening import opened, sampling_of, with_room
from .reading import read_form
from .run import Run
from .shapes import new_id
from .state import HttpState
from .tools.offered import read_offer


async def chat_completions(state: HttpState, request: Request) -> Response:
    """Raises `HttpError` and `RametError`."""
    form = await read_form(request, ChatForm, state.limits.body_bytes)
    live = state.need_model(form.model)
    form.check()
    sampling = sampling_of(live, form)
    go_on = bool(form.continue_final_message)
    asked = await ask(
        live,
        form.messages,
        offer=read_offer(form.tools, form.tool_choice, form.parallel_tool_calls),
        constraint=constraint_of(form.response_format, form.structured_outputs),
        separate=form.separate_reasoning is not False,
        answer=form.add_generation_prompt is not False and not go_on,
        go_on=go_on,
        variables=form.template_variables,
        template=form.chat_template,
    )
    rid = new_id("chatcmpl", request, form.request_id)
    samplings = [with_room(live, sampling | asked.sampling, len(asked.ids))]
    run = Run(state, live, rid, [asked.ids], samplings, form.cache_salt, explain=form.explain)
    answer = ChatAnswer(state, live, form, rid, asked.voice)
    if form.stream:
        return Events(await opened(request, answer.events(run)), {"X-Request-Id": rid})
    (result,) = await while_connected(request, run.whole())
    return json_answer(answer.whole(result), headers={"X-Request-Id": rid})
