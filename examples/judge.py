"""Branch, solve, merge: an essay is judged by several criteria at once, then as a whole."""

from __future__ import annotations

import argparse
from typing import Any

import ramet as rt

ESSAY = (
    "Trees make our cities better. They cool the streets in summer, clean the air and give birds a "
    "home. A city that plants trees along its roads today will be a healthier place in ten years."
)
CRITERIA = ("clarity", "persuasion", "style")
GRADES = ["poor", "fair", "good", "excellent"]


@rt.function
def judge(s: Any, essay: str) -> None:
    s += rt.system("You are a teacher who comments on essays in one short sentence.")
    s += rt.user(f"Read this essay.\n\n{essay}")
    s += rt.assistant("I have read it. What do you want to know?")
    branches = s.fork(len(CRITERIA))
    for criterion, branch in zip(CRITERIA, branches, strict=True):
        branch += rt.user(f"Comment on its {criterion}.")
        branch += rt.assistant(rt.gen("comment", max_tokens=40, stop=[".", "\n"]))
        branch += rt.user(f"Its {criterion} is poor, fair, good or excellent?")
        branch += rt.assistant(f"The {criterion} is " + rt.select("grade", GRADES))
    branches.join()
    s += rt.user("What do you think of it as a whole?")
    comments = " ".join(f"{comment}." for comment in s["comment"])
    s += rt.assistant(
        comments + " All in all," + rt.gen("verdict", max_tokens=32, stop=[".", "\n"])
    )


def main(backend: rt.Backend) -> None:
    state = judge.run(ESSAY, backend=backend, temperature=0)
    for criterion, grade, comment in zip(CRITERIA, state["grade"], state["comment"], strict=True):
        print(f"{criterion}: {grade}. {comment}.")
    print(f"all in all,{state['verdict']}.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", help="a running server; otherwise one is embedded")
    url = parser.parse_args().backend
    with rt.RuntimeEndpoint(url) if url else rt.Runtime() as runtime:
        main(runtime)
