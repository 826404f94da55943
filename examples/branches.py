"""Three branches grow from one prompt at the same time; then the model picks one of them.

python examples/branches.py [TOPIC …] [--backend tcp://127.0.0.1:7411]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import ramet as rt
from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

BRANCHES = 3
TOPIC = "sleeping well"


@rt.function
def advise(s: Any, topic: str) -> None:
    s += rt.system("You are a helpful assistant who answers in one short sentence.")
    s += rt.user(f"Give me one tip for {topic}.")
    branches = s.fork(BRANCHES)
    for number, branch in enumerate(branches):
        branch += rt.assistant(
            rt.gen("tip", max_tokens=48, stop="\n", temperature=0.4, seed=number)
        )
    branches.join()
    tips = "\n".join(f"{number}. {tip}" for number, tip in enumerate(s["tip"], start=1))
    s += rt.assistant(tips)
    s += rt.user("Which of them is the best? Answer with its number.")
    s += rt.assistant(rt.select("best", [str(number + 1) for number in range(BRANCHES)]))


def panels(texts: list[str], console: Console, best: int | None = None) -> Columns:
    """The branches' answers so far, side by side; the chosen one stands out."""
    width = max(24, console.width // BRANCHES - 1)
    boxes = [
        Panel(
            Text(text.strip()),
            title=f"branch {number}",
            width=width,
            height=12,
            border_style="green" if number == best else "none",
        )
        for number, text in enumerate(texts, start=1)
    ]
    return Columns(boxes, padding=(0, 1))


def show(state: Any, console: Console) -> list[str]:
    """Draw the answers as they come: one stream of events tells what each branch adds. Returns the
    answers as they were drawn."""
    texts = [""] * BRANCHES
    with Live(panels(texts, console), console=console, refresh_per_second=20) as live:
        for path, variable, delta in state.events():
            if variable == "tip":
                texts[path[0]] += delta
                live.update(panels(texts, console))
        live.update(panels(texts, console, best=int(state["best"])))
    return texts


def main(backend: rt.Backend, topic: str = TOPIC) -> None:
    console = Console()
    state = advise.run(topic, backend=backend, stream=True)
    show(state, console)
    best = int(state["best"])
    console.print(f"\nbest: {best}. {state['tip'][best - 1].strip()}", markup=False)
    prompts = [info["prompt_tokens"] for info in state.get_meta_info("tip")]
    cached = [info["cached_tokens"] for info in state.get_meta_info("tip")]
    console.print(f"[dim]prompt tokens of the branches: {prompts}, found in the tree: {cached}[/]")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Three branches streamed side by side.")
    parser.add_argument("topic", nargs="*", help=f"what to give tips for (default: {TOPIC})")
    parser.add_argument("--backend", help="a running server; otherwise one is embedded")
    given = parser.parse_args()
    began = time.monotonic()
    with rt.RuntimeEndpoint(given.backend) if given.backend else rt.Runtime() as runtime:
        print(f"ready after {time.monotonic() - began:.1f} s")
        main(runtime, " ".join(given.topic) or TOPIC)
