"""Self-consistency: several chains of thought are sampled from one prompt; the majority answers."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from typing import Any

import ramet as rt

SAMPLES = 8
SHOTS = """\
Q: Tom has 3 apples and buys 4 more. How many apples does he have?
A: Tom had 3 apples. He bought 4 more. 3 + 4 = 7. The answer is 7.

Q: Mary has 2 cats and gets 4 more. How many cats does she have?
A: Mary had 2 cats. She got 4 more. 2 + 4 = 6. The answer is 6.

"""


@rt.function
def reason(s: Any, question: str) -> None:
    s += SHOTS + f"Q: {question}\nA:"
    s += rt.gen("chains", n=SAMPLES, max_tokens=40, stop="\n", temperature=0.7, seed=1)


def vote(chains: list[str]) -> Counter[str]:
    """How many chains end in which answer. One that states none has no vote."""
    found = [re.search(r"answer is (-?\d+)", chain) for chain in chains]
    return Counter(match[1] for match in found if match)


def main(backend: rt.Backend) -> None:
    question = "Anna has 5 pencils and gets 3 more. How many pencils does she have?"
    state = reason.run(question, backend=backend)
    votes = vote(state["chains"])
    print(question)
    for chain in state["chains"]:
        print(" ", chain.strip())
    for answer, count in votes.most_common():
        print(f"{answer}: {count} of {SAMPLES} votes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", help="a running server; otherwise one is embedded")
    url = parser.parse_args().backend
    with rt.RuntimeEndpoint(url) if url else rt.Runtime() as runtime:
        main(runtime)
