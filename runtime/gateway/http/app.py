"""The application: which path is handled where, and every failure in one form."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...version import version
from . import admin, cache, programs
from .answers import error_answer
from .chat import chat_completions
from .completions import completions
from .errors import HttpError
from .forms import (
    AbortForm,
    ChatForm,
    CompletionForm,
    DetokenizeForm,
    NativeForm,
    TokenizeForm,
)
from .guard import Guard
from .native import generate_native
from .openapi import described
from .program_forms import AppendForm, ProgramForm
from .responses import endpoint as responses
from .responses.form import ResponseForm
from .score import ScoreForm, score
from .state import HttpState
from .tokens import detokenize, tokenize

FORMS: dict[str, type[msgspec.Struct]] = {
    "/v1/completions": CompletionForm,
    "/v1/chat/completions": ChatForm,
    "/generate": NativeForm,
    "/tokenize": TokenizeForm,
    "/detokenize": DetokenizeForm,
    "/v1/tokenize": TokenizeForm,
    "/v1/detokenize": DetokenizeForm,
    "/v1/responses": ResponseForm,
    "/v1/responses/input_tokens": ResponseForm,
    "/v1/score": ScoreForm,
    "/v1/programs": ProgramForm,
    "/v1/programs/{id}/append": AppendForm,
    "/v1/cache/explain": cache.ExplainForm,
    "/abort": AbortForm,
    "/abort_request": AbortForm,
}
"""What each path takes as its body."""

Handler = Callable[[HttpState, Request], Awaitable[Response]]

ROUTES: tuple[tuple[str, tuple[str, ...], Handler], ...] = (
    ("/v1/completions", ("POST",), completions),
    ("/v1/chat/completions", ("POST",), chat_completions),
    ("/v1/models", ("GET",), admin.models),
    ("/v1/models/{name:path}", ("GET",), admin.models),
    ("/v1/responses", ("POST",), responses.create),
    ("/v1/responses/input_tokens", ("POST",), responses.count),
    ("/v1/responses/{id}", ("GET",), responses.show),
    ("/v1/responses/{id}", ("DELETE",), responses.delete),
    ("/v1/responses/{id}/cancel", ("POST",), responses.cancel),
    ("/v1/responses/{id}/input_items", ("GET",), responses.input_items),
    ("/v1/score", ("POST",), score),
    ("/v1/programs", ("POST",), programs.open_program),
    ("/v1/programs/{id}", ("GET",), programs.show),
    ("/v1/programs/{id}", ("DELETE",), programs.cancel),
    ("/v1/programs/{id}/append", ("POST",), programs.append),
    ("/v1/programs/{id}/events", ("GET",), programs.events),
    ("/generate", ("POST", "PUT"), generate_native),
    ("/tokenize", ("POST",), tokenize),
    ("/detokenize", ("POST",), detokenize),
    ("/v1/tokenize", ("POST",), tokenize),
    ("/v1/detokenize", ("POST",), detokenize),
    ("/health", ("GET", "HEAD"), admin.health),
    ("/health_generate", ("GET", "HEAD"), admin.ready),
    ("/ready", ("GET", "HEAD"), admin.ready),
    ("/metrics", ("GET",), admin.metrics),
    ("/version", ("GET",), admin.show_version),
    ("/server_info", ("GET",), admin.info),
    ("/get_server_info", ("GET",), admin.info),
    ("/get_model_info", ("GET",), admin.model_info),
    ("/model_info", ("GET",), admin.model_info),
    ("/abort", ("POST",), admin.abort),
    ("/abort_request", ("POST",), admin.abort),
    ("/flush_cache", ("GET", "POST"), admin.flush),
    ("/v1/cache/explain", ("GET", "POST"), cache.explain_prompt),
    ("/v1/cache/tree", ("GET",), cache.tree),
)


def make_app(state: HttpState) -> FastAPI:
    """All endpoints over ``state``."""
    app = FastAPI(title="ramet", version=version(), docs_url=None, redoc_url=None)
    for path, methods, handler in ROUTES:
        for method in methods:
            app.add_api_route(
                path,
                _endpoint(state, handler),
                methods=[method],
                response_class=JSONResponse,
                operation_id=f"{method.lower()}{re.sub(r'[^a-z]+', '_', path)}",
                openapi_extra=described(path, None if method == "GET" else FORMS.get(path)),
            )
    app.add_middleware(Guard, state=state)
    app.add_exception_handler(HTTPException, _framework_error)
    return app


def _endpoint(state: HttpState, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            return await handler(state, request)
        except Exception as error:
            return error_answer(error)

    endpoint.__name__ = handler.__name__
    return endpoint


async def _framework_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = {404: "there is nothing at this path", 405: "this path does not take this method"}
    message = text.get(error.status_code, str(error.detail))
    return error_answer(HttpError(error.status_code, message, headers=error.headers))
