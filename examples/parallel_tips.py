"""Two tips, expanded at the same time in branches of one conversation, then joined."""

from __future__ import annotations

import argparse
from typing import Any

import ramet as rt

HEADINGS = ("eating well", "exercise", "sleep")


@rt.function
def parallel_tips(s: Any, goal: str) -> None:
    s += rt.system("You are a helpful assistant who answers in one short sentence.")
    s += rt.user(f"I want to {goal}.")
    s += rt.assistant("What do you want to know?")
    with s.fork(len(HEADINGS)) as branches:
        for heading, branch in zip(HEADINGS, branches, strict=True):
            branch += rt.user(f"Give me one tip about {heading}.")
            branch += rt.assistant(rt.gen("tip", max_tokens=40, stop="\n"))
    # The end of the block joined the branches: `tip` is now a list, one entry a branch.
    tips = "\n".join(f"{h}: {tip}" for h, tip in zip(HEADINGS, s["tip"], strict=True))
    s += rt.user("Tell me what you said again.")
    s += rt.assistant(tips)
    s += rt.user("Sum that up in one sentence.")
    s += rt.assistant(rt.gen("summary", max_tokens=40, stop="\n"))


def main(backend: rt.Backend) -> None:
    state = parallel_tips.run("stay healthy", backend=backend, temperature=0)
    for heading, tip in zip(HEADINGS, state["tip"], strict=True):
        print(f"{heading}: {tip}")
    print("In short:", state["summary"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", help="a running server; otherwise one is embedded")
    url = parser.parse_args().backend
    with rt.RuntimeEndpoint(url) if url else rt.Runtime() as runtime:
        main(runtime)
