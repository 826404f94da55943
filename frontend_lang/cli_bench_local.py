"""``ramet bench offline`` and ``programs``: an embedded runtime, no server in front of it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .cli_bench_show import OutFile, progress, show
from .cli_settings import OF_SERVERS, with_model, with_settings

if TYPE_CHECKING:
    from .function import Function

_MODEL = Annotated[
    str | None, typer.Argument(help="Alias, folder, .gguf file or hub id.", show_default=False)
]


@with_settings(leave_out=OF_SERVERS)
def offline(
    model: _MODEL = None,
    num_prompts: Annotated[int, typer.Option("--num-prompts", min=1)] = 16,
    input_len: Annotated[int, typer.Option("--input-len", min=1, help="Tokens of a prompt.")] = 288,
    shared_len: Annotated[
        int, typer.Option("--shared-len", min=0, help="How many of them all prompts begin with.")
    ] = 256,
    output_len: Annotated[
        int, typer.Option("--output-len", min=1, help="Tokens of an answer, all generated.")
    ] = 64,
    repeat: Annotated[
        int, typer.Option("--repeat", min=1, help="Turns; the best counts, one more warms up.")
    ] = 2,
    out: OutFile = None,
    *,
    settings: dict[str, Any],
) -> None:
    """A batch of random prompts through a runtime of this process, the tree empty at first."""
    from . import Runtime

    rng = random.Random(0)
    shared = min(shared_len, input_len)
    sampling = {"temperature": 0, "max_new_tokens": output_len, "ignore_eos": True}
    with Runtime(**with_model(settings, model)) as runtime:
        size = runtime.tokenizer.vocab_size

        def ids(count: int) -> list[int]:
            return [rng.randrange(size // 500, size - size // 50) for _ in range(count)]

        best = float("inf")
        with progress(f"{num_prompts} prompts of {input_len} tokens") as bar:
            for _ in bar.track(range(repeat + 1)):
                stem = ids(shared)
                prompts = [stem + ids(input_len - shared) for _ in range(num_prompts)]
                runtime.flush_cache()
                began = time.monotonic()
                runtime.generate(input_ids=prompts, sampling_params=sampling)
                took = time.monotonic() - began
                best = best if _ == 0 else min(best, took)
        name = runtime.server_info()["model"]
    show(
        {
            "model": name,
            "requests": num_prompts,
            "seconds": round(best, 3),
            "prompt_tokens": num_prompts * input_len,
            "generated_tokens": num_prompts * output_len,
            "requests_per_s": round(num_prompts / best, 2),
            "generated_tokens_per_s": round(num_prompts * output_len / best, 1),
        },
        out,
    )


@with_settings(leave_out=(*OF_SERVERS, "disable_radix_cache"))
def programs(
    model: _MODEL = None,
    repeat: Annotated[
        int, typer.Option("--repeat", min=1, help="Turns; the best counts, one more warms up.")
    ] = 2,
    out: OutFile = None,
    *,
    settings: dict[str, Any],
) -> None:
    """Programs that branch, with the tree and without: seconds, and tokens computed."""
    from . import Runtime

    checked = with_model(settings, model)
    works = _workloads()
    figures: dict[str, Any] = {}
    with (
        Runtime(**checked) as tree,
        Runtime(**checked, disable_radix_cache=True) as off,
        progress("programs") as bar,
    ):
        task = bar.add_task("", total=len(works) * (repeat + 1) * 2)
        for name, (function, arguments) in works.items():
            seconds: dict[str, float] = {}
            computed: dict[str, int] = {}
            for turn in range(repeat + 1):
                for mode, runtime in (("tree", tree), ("off", off)):
                    runtime.flush_cache()
                    before = runtime.server_info()["computed_tokens"]
                    began = time.monotonic()
                    for state in function.run_batch(arguments, backend=runtime, temperature=0):
                        state.sync()
                    took = time.monotonic() - began
                    if turn:
                        seconds[mode] = min(seconds.get(mode, took), took)
                    computed[mode] = runtime.server_info()["computed_tokens"] - before
                    bar.advance(task)
            figures[f"{name}, s"] = {mode: round(value, 3) for mode, value in seconds.items()}
            figures[f"{name}, tokens computed"] = computed
            figures[f"{name}, off / tree"] = round(seconds["off"] / seconds["tree"], 2)
    show(figures, out)


def _workloads() -> dict[str, tuple[Function, list[dict[str, Any]]]]:
    from . import assistant, function, gen, select, user

    shots = "".join(
        f"Question: What is {a} plus {b}?\nThought: I add {a} and {b}, which gives {a + b}.\n"
        f"Answer: {a + b}\n\n"
        for a, b in ((i * 7 % 50, i * 11 % 40) for i in range(1, 11))
    )

    @function
    def questions(s: Any, number: int) -> None:
        s += shots + f"Question: What is {number} plus 3?\nAnswer:" + gen("answer", max_tokens=2)

    @function
    def verdicts(s: Any, number: int) -> None:
        s += shots + f"Statement: {number} is even.\nIs it true? Answer:"
        s += select("verdict", [" yes", " no", " unknown"])

    @function
    def branches(s: Any, number: int) -> None:
        s += shots + f"Problem {number}: plan a day.\n"
        for fork in s.fork(4):
            fork += "A plan:" + gen("plan", max_tokens=16, ignore_eos=True)

    @function
    def turns(s: Any, number: int) -> None:
        for turn in range(4):
            s += user(f"Turn {turn}: tell me about {number}. " + shots[:600])
            s += assistant(gen("reply", max_tokens=8, ignore_eos=True))
            _ = s["reply"]

    count: Callable[[int], list[dict[str, Any]]] = lambda n: [{"number": i} for i in range(n)]  # noqa: E731
    return {
        "few shots": (questions, count(12)),
        "select": (verdicts, count(6)),
        "fork": (branches, count(3)),
        "turns": (turns, count(3)),
    }
