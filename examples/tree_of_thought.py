"""Tree of thought: a story grows sentence by sentence; each step keeps the best of several drafts.

Every node of the search is a branch of the program, so what two drafts share is computed once.
"""

from __future__ import annotations

import argparse
from typing import Any

import ramet as rt

DEPTH = 3  # sentences
BREADTH = 3  # drafts of each
BEAM = 2  # stories that are kept


def draft(node: Any, seed: int) -> None:
    node += rt.gen("sentence", max_tokens=28, stop=[".", "\n"], temperature=0.8, seed=seed)
    node += "."


def judge(node: Any) -> Any:
    """A branch off the story that asks about it; the story itself does not see the question."""
    critic = node.copy()
    critic += "\n\nQuestion: Is this a good story, with sentences that fit together?\nAnswer: "
    critic += rt.select("verdict", ["Yes", "No"])
    return critic


def score(critic: Any) -> float:
    """By how much the model prefers Yes, in log-probabilities."""
    yes, no = critic.get_meta_info("verdict")["normalized_prompt_logprobs"]
    return yes - no


@rt.function
def tree_of_thought(s: Any, opening: str) -> str:
    s += "A short story for children:\n\n" + opening
    frontier = [(s, opening)]
    for depth in range(DEPTH):
        drafts = []
        for parent, story in frontier:
            for number, node in enumerate(parent.fork(BREADTH)):
                draft(node, seed=depth * BREADTH + number)
                drafts.append((judge(node), node, story))
        # All drafts and their judges have been appended; only now is the first value waited for.
        drafts.sort(key=lambda item: score(item[0]), reverse=True)
        stories = [(node, f"{story}{node['sentence']}.") for _, node, story in drafts]
        frontier = [pair for pair in stories if pair[0]["sentence"].strip()][:BEAM] or stories[:1]
    return frontier[0][1]


def main(backend: rt.Backend) -> None:
    state = tree_of_thought.run("Once upon a time there was a small fox.", backend=backend)
    print(state.ret_value)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", help="a running server; otherwise one is embedded")
    url = parser.parse_args().backend
    with rt.RuntimeEndpoint(url) if url else rt.Runtime() as runtime:
        main(runtime)
