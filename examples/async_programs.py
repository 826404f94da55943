"""Programs under asyncio: several at once, one streamed, one given up."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import ramet as rt


@rt.function
def ask(s: Any, question: str) -> None:
    s += rt.system("You are a helpful assistant who answers in one short sentence.")
    s += rt.user(question)
    s += rt.assistant(rt.gen("answer", max_tokens=40))


async def side_by_side(backend: rt.Backend, questions: list[str]) -> list[str]:
    """All at once; the event loop stays free for other work meanwhile."""
    runs = [ask.arun(question, backend=backend, temperature=0) for question in questions]
    return [state["answer"] for state in await asyncio.gather(*runs)]


async def streamed(backend: rt.Backend, question: str) -> str:
    """Prints each piece as it comes."""
    state = await ask.arun(question, backend=backend, stream=True, temperature=0)
    pieces = []
    async for piece in state.text_async_iter("answer"):
        print(piece, end="", flush=True)
        pieces.append(piece)
    print()
    return "".join(pieces)


async def given_up(backend: rt.Backend, question: str, seconds: float) -> bool:
    """Whether it took too long. A cancelled wait aborts the program in the runtime too."""
    try:
        await asyncio.wait_for(ask.arun(question, backend=backend, ignore_eos=True), seconds)
    except TimeoutError:
        return True
    return False


async def run(backend: rt.Backend) -> None:
    countries = ("Japan", "Germany", "Egypt")
    questions = [f"What is the capital of {country}?" for country in countries]
    for answer in await side_by_side(backend, questions):
        print(answer)
    await streamed(backend, "Where do penguins live?")
    print("given up in time:", await given_up(backend, "What is the meaning of life?", 0.05))


def main(backend: rt.Backend) -> None:
    asyncio.run(run(backend))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", help="a running server; otherwise one is embedded")
    url = parser.parse_args().backend
    with rt.RuntimeEndpoint(url) if url else rt.Runtime() as runtime:
        main(runtime)
