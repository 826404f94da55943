"""Three branches grow from one prompt at the same time; then the model picks one of them.

python examples/branches.py [TOPIC]
"""

from __future__ import annotations

import sys
import time
from typing import Any

import ramet as rt
from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel

BRANCHES = 3


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


def show(state: Any, console: Console) -> None:
    """Draw each branch's answer as it comes, side by side."""
    texts = [""] * BRANCHES
    width = max(24, console.width // BRANCHES - 1)

    def panels() -> Columns:
        boxes = [
            Panel(text or " ", title=f"branch {number + 1}", width=width, height=12)
            for number, text in enumerate(texts)
        ]
        return Columns(boxes, padding=(0, 1))

    with Live(panels(), console=console, refresh_per_second=20) as live:
        for path, variable, delta in state.events():
            if variable == "tip":
                texts[path[0]] += delta
                live.update(panels())


def main() -> None:
    topic = " ".join(sys.argv[1:]) or "sleeping well"
    console = Console()
    began = time.monotonic()
    with rt.Runtime() as runtime:
        console.print(f"[dim]ready after {time.monotonic() - began:.1f} s[/]")
        state = advise.run(topic, backend=runtime, stream=True)
        show(state, console)
        best = int(state["best"])
        console.print(f"\nbest: {best}. {state['tip'][best - 1].strip()}", markup=False)
        seen = runtime.server_info()
        console.print(
            f"[dim]{seen['prompt_tokens']} prompt tokens, "
            f"{seen['cache_hit_tokens']} of them found in the tree[/]"
        )


if __name__ == "__main__":
    main()
