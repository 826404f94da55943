"""Programs and generations under asyncio: many at once, streamed, cancelled."""

from __future__ import annotations

import asyncio
import threading
import time
from itertools import pairwise
from typing import Any

import pytest
import ramet as rt

GREEDY = {"temperature": 0.0, "max_new_tokens": 48}
ENDLESS = {"max_new_tokens": 2000, "ignore_eos": True}


@rt.function
def completion(s: Any, prompt: str) -> None:
    s += prompt
    s += rt.gen("answer", return_logprob=True)


@rt.function
def endless(s: Any) -> None:
    s += "Once upon a time"
    s += rt.gen("story", max_tokens=2000, ignore_eos=True)


async def test_sixteen_programs_at_once(cold: Any, sixteen: Any, oracle: Any) -> None:
    states = await asyncio.gather(
        *(
            completion.arun(case["prompt"], backend=cold, temperature=0.0, max_new_tokens=24)
            for case in sixteen
        )
    )
    for case, state in zip(sixteen, states, strict=True):
        oracle.output(case, state.get_meta_info("answer"), new=24)


async def test_a_batch(cold: Any, greedy_cases: Any, oracle: Any) -> None:
    cases = greedy_cases[:4]
    states = await completion.arun_batch(
        [{"prompt": case["prompt"]} for case in cases],
        backend=cold,
        temperature=0.0,
        max_new_tokens=24,
    )
    for case, state in zip(cases, states, strict=True):
        oracle.output(case, state.get_meta_info("answer"), new=24)


async def test_compiled(runtime: Any, greedy_cases: Any, oracle: Any) -> None:
    case = greedy_cases[0]
    state = await completion.compile().arun(
        case["prompt"], backend=runtime, temperature=0.0, max_new_tokens=12
    )
    oracle.output(case, state.get_meta_info("answer"), new=12)


async def test_generations(runtime: Any, greedy_cases: Any, oracle: Any) -> None:
    cases = greedy_cases[:4]
    replies = await runtime.async_generate(
        [case["prompt"] for case in cases], sampling_params=GREEDY, return_logprob=True
    )
    for case, reply in zip(cases, replies, strict=True):
        oracle.output(case, reply["meta_info"])
    with pytest.raises(rt.ContextLengthError):
        await runtime.async_generate(input_ids=[5] * 9000, sampling_params=GREEDY)


async def test_a_streamed_generation(runtime: Any, greedy_cases: Any) -> None:
    case = greedy_cases[3]
    texts = [
        item["text"]
        async for item in await runtime.async_generate(
            case["prompt"], sampling_params=GREEDY, stream=True
        )
    ]
    assert texts[-1] == case["output_text"]
    assert len(set(texts)) > 10
    assert all(after.startswith(before) for before, after in pairwise(texts))


async def test_streams_with_meta_data(runtime: Any, greedy_cases: Any, oracle: Any) -> None:
    case = greedy_cases[0]
    state = await completion.arun(
        case["prompt"], backend=runtime, stream=True, temperature=0.0, max_new_tokens=48
    )
    pieces, entries = [], []
    async for piece, meta in state.text_async_iter("answer", return_meta_data=True):
        pieces.append(piece)
        entries += meta.get("output_token_logprobs") or []
    oracle.text(case, "".join(pieces))
    oracle.ids(case, [token for _, token, _ in entries])
    whole = [piece async for piece in state.text_async_iter()]
    assert "".join(whole) == case["prompt"] + case["output_text"]


async def test_the_loop_is_not_held_up(runtime: Any) -> None:
    """While a program runs, other tasks do."""
    longest = 0.0

    async def tick() -> None:
        nonlocal longest
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.01)
            longest = max(longest, time.monotonic() - began)

    ticking = asyncio.create_task(tick())
    state = await completion.arun("The sea", backend=runtime, temperature=0.0, max_new_tokens=48)
    ticking.cancel()
    duration = state.get_meta_info("answer")["e2e_latency"]
    assert longest < max(0.5, duration / 2)


async def test_cancelling_aborts(runtime: Any, settled: Any) -> None:
    tasks = [
        asyncio.create_task(endless.arun(backend=runtime)),
        asyncio.create_task(endless.compile().arun(backend=runtime)),
        asyncio.create_task(runtime.async_generate("Once", sampling_params=ENDLESS)),
        asyncio.create_task(endless.arun_batch([{}, {}], backend=runtime)),
    ]
    deadline = time.monotonic() + 30
    while (await asyncio.to_thread(runtime.server_info))["requests"]["running"] < 5:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, asyncio.CancelledError)
    await asyncio.to_thread(settled, runtime, 5.0)


async def test_a_timeout_aborts(runtime: Any, settled: Any) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(endless.arun(backend=runtime), 0.5)
    with pytest.raises(rt.BackendError, match=r"0\.5 s"):
        await endless.arun(backend=runtime, timeout=0.5)
    stream = await runtime.async_generate("Once", sampling_params=ENDLESS, stream=True)
    async for _ in stream:
        break
    await stream.aclose()
    await asyncio.to_thread(settled, runtime, 5.0)


def test_loops_of_several_threads(runtime: Any, greedy_cases: Any, oracle: Any) -> None:
    """One runtime serves any number of event loops."""
    cases = greedy_cases[:3]
    metas: dict[str, Any] = {}

    def work(case: dict[str, Any]) -> None:
        async def main() -> None:
            state = await completion.arun(
                case["prompt"], backend=runtime, temperature=0.0, max_new_tokens=12
            )
            metas[case["id"]] = state.get_meta_info("answer")

        asyncio.run(main())

    threads = [threading.Thread(target=work, args=(case,)) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for case in cases:
        oracle.output(case, metas[case["id"]], new=12)
