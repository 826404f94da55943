"""Skeleton of thought: first the points of an answer, then all of them written out at once."""

from __future__ import annotations

import argparse
from typing import Any

import ramet as rt

POINTS = 3
SHOTS = """\
Question: How do I grow tomatoes?
1. Choose a sunny place
2. Water them every day
3. Tie them to a stick

Question: How do I sleep better?
1. Go to bed early
2. Drink no coffee in the evening
3. Keep the room dark

"""


@rt.function
def skeleton_of_thought(s: Any, question: str) -> None:
    s += SHOTS + f"Question: {question}\n"
    for number in range(1, POINTS + 1):
        s += f"{number}." + rt.gen(f"point {number}", max_tokens=12, stop="\n") + "\n"
    branches = s.fork(POINTS)
    for number, branch in enumerate(branches, start=1):
        point = s[f"point {number}"].strip()
        branch += rt.user(f"{point}: why is that good for me? Answer in one short sentence.")
        branch += rt.assistant(rt.gen("sentence", max_tokens=40, stop="\n"))
    branches.join()


def main(backend: rt.Backend) -> None:
    question = "How do I stay healthy?"
    state = skeleton_of_thought.run(question, backend=backend, temperature=0)
    print(question)
    for number, sentence in enumerate(state["sentence"], start=1):
        print(f"{number}.{state[f'point {number}']}: {sentence}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", help="a running server; otherwise one is embedded")
    url = parser.parse_args().backend
    with rt.RuntimeEndpoint(url) if url else rt.Runtime() as runtime:
        main(runtime)
