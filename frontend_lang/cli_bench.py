"""``ramet bench``: how fast a server, a runtime or programs are on this machine."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import typer
from ramet.runtime.protocol import BackendError

from . import cli_bench_local
from .cli_bench_load import Load, Reply
from .cli_bench_show import OutFile, percentiles, progress, show

app = typer.Typer(help="Measure a server, a runtime, or programs.", no_args_is_help=True)
app.command("offline")(cli_bench_local.offline)
app.command("programs")(cli_bench_local.programs)

_ENDINGS = ("all", "ay", "it")
_WORDS = [f"{first}{ending}" for first in "bcdfghlmnprstw" for ending in _ENDINGS]
_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@app.command("serve")
def serve(
    url: Annotated[
        str, typer.Option("--url", "--base-url", help="Where the server is.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option("--model-path", "--model", help="Its name; else what is served.")
    ] = None,
    endpoint: Annotated[
        Literal["completions", "chat"], typer.Option("--endpoint", help="Which form of request.")
    ] = "completions",
    num_prompts: Annotated[int, typer.Option("--num-prompts", min=1)] = 100,
    concurrency: Annotated[
        int | None,
        typer.Option("--concurrency", "--max-concurrency", min=1, help="Requests at a time."),
    ] = None,
    request_rate: Annotated[
        float | None,
        typer.Option("--request-rate", min=0.001, help="Requests a second (Poisson), else no wait"),
    ] = None,
    input_len: Annotated[int, typer.Option("--input-len", min=1, help="Words of a prompt.")] = 256,
    shared_len: Annotated[
        int, typer.Option("--shared-len", min=0, help="How many of them all prompts begin with.")
    ] = 0,
    output_len: Annotated[
        int, typer.Option("--output-len", min=1, help="Tokens of an answer, all generated.")
    ] = 64,
    stream: Annotated[bool, typer.Option("--stream/--no-stream")] = True,
    seed: Annotated[int, typer.Option("--random-seed", "--seed")] = 0,
    api_key: Annotated[str | None, typer.Option("--api-key", envvar="RAMET_API_KEY")] = None,
    out: OutFile = None,
) -> None:
    """Offer load to a server that runs, ours or any other with OpenAI's API, and show latencies.

    Exits with 1 when a request failed."""
    if request_rate is None and concurrency is None:
        concurrency = 16
    bodies = _bodies(endpoint, num_prompts, input_len, shared_len, output_len, stream, seed)

    async def run() -> tuple[str, list[Reply], float]:
        load = Load(url, api_key)
        try:
            served = model or await _served(load)
            requests = [
                load.request(_PATHS[endpoint], {**body, "model": served}) for body in bodies
            ]
            with progress(f"{num_prompts} requests to {served}") as bar:
                task = bar.add_task("", total=num_prompts)
                began = time.monotonic()
                replies = await load.run(
                    requests, concurrency=concurrency, rate=request_rate, seed=seed,
                    on_reply=lambda _: bar.advance(task),
                )  # fmt: skip
                return served, replies, time.monotonic() - began
        finally:
            load.close()

    served, replies, seconds = asyncio.run(run())
    good = [reply for reply in replies if reply.status == 200]
    figures: dict[str, Any] = {"model": served, "requests": len(replies)}
    figures |= {"failed": len(replies) - len(good)} | figures_of(good, seconds, stream)
    show(figures, out)
    if len(good) < len(replies):
        bad = next(reply for reply in replies if reply.status != 200)
        raise BackendError(f"a request failed: {bad.failure or bad.body().decode()[:300]}")


def figures_of(replies: Sequence[Reply], seconds: float, stream: bool) -> dict[str, Any]:
    """Throughput, and percentiles in milliseconds: to the first token, between tokens, to the
    end."""
    prompt = generated = 0
    first: list[float] = []
    between: list[float] = []
    for reply in replies:
        events = reply.events() if stream else []
        last = events[-1][1] if stream else json.loads(reply.body())
        usage: dict[str, int] = last.get("usage") or {}
        prompt += usage.get("prompt_tokens", 0)
        generated += usage.get("completion_tokens", 0)
        times = [at for at, event in events if _has_text(event)]
        if times:
            first.append(times[0] - reply.sent)
            if usage.get("completion_tokens", 0) > 1 and len(times) > 1:
                between.append((times[-1] - times[0]) / (usage["completion_tokens"] - 1))
    figures: dict[str, Any] = {
        "seconds": round(seconds, 3),
        "prompt_tokens": prompt,
        "generated_tokens": generated,
        "requests_per_s": round(len(replies) / seconds, 2),
        "generated_tokens_per_s": round(generated / seconds, 1),
    }
    ended = [reply.ended - reply.sent for reply in replies]
    for name, values in (("ttft_ms", first), ("itl_ms", between), ("e2e_ms", ended)):
        if values:
            figures[name] = percentiles(values)
    return figures


def _bodies(
    endpoint: str, count: int, length: int, shared: int, output: int, stream: bool, seed: int
) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    shared = min(shared, length)
    stem = rng.choices(_WORDS, k=shared)
    body: dict[str, Any] = {"max_tokens": output, "temperature": 0, "ignore_eos": True}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    found: list[dict[str, Any]] = []
    for _ in range(count):
        text = " ".join([*stem, *rng.choices(_WORDS, k=length - shared)])
        if endpoint == "chat":
            found.append({**body, "messages": [{"role": "user", "content": text}]})
        else:
            found.append({**body, "prompt": text})
    return found


async def _served(load: Load) -> str:
    reply = await load.ask(load.request("/v1/models"))
    if reply.status != 200:
        raise BackendError(f"/v1/models says {reply.status}: {reply.body().decode()[:200]}")
    return str(json.loads(reply.body())["data"][0]["id"])


def _has_text(event: dict[str, Any]) -> bool:
    choices: list[dict[str, Any]] = event.get("choices") or [{}]
    delta: dict[str, Any] = choices[0].get("delta") or {}
    return bool(choices[0].get("text") or delta.get("content"))
