"""A debate of two agents, each a branch with a conversation of its own; a third one judges."""

from __future__ import annotations

import argparse
from typing import Any

import ramet as rt

ROUNDS = 2


@rt.function
def debate(s: Any, first: str, second: str) -> list[str]:
    """What was said, in turn; the variable `winner` is on the state."""
    sides = (first, second)
    *agents, jury = s.fork(3)
    for side, other, agent in zip(sides, sides[::-1], agents, strict=True):
        agent += rt.system(
            f"You are in a debate. You are for {side} and against {other}. "
            "You speak in one short sentence."
        )
    said = [f"Which are better, {first} or {second}?"]
    for turn in range(2 * ROUNDS):
        side, agent = sides[turn % 2], agents[turn % 2]
        agent += rt.user(said[-1])
        start = f"I prefer {side} because"
        reason = rt.gen(f"turn {turn}", max_tokens=28, stop=["\n", "."], seed=turn)
        agent += rt.assistant(start + reason)
        said.append(f"{start}{agent[f'turn {turn}']}.")
    jury += rt.user("\n".join(said[1:]) + f"\nWhich are better, {first} or {second}?")
    jury += rt.assistant("I vote for " + rt.select("winner", list(sides)))
    s["winner"] = jury["winner"]
    return said[1:]


def main(backend: rt.Backend) -> None:
    state = debate.run("cats", "dogs", backend=backend, temperature=0.7)
    for turn, text in enumerate(state.ret_value):
        print(f"agent {turn % 2 + 1}: {text}")
    print("winner:", state["winner"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", help="a running server; otherwise one is embedded")
    url = parser.parse_args().backend
    with rt.RuntimeEndpoint(url) if url else rt.Runtime() as runtime:
        main(runtime)
