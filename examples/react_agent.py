"""A ReAct agent: thought, action and argument by the model, the observation by a Python tool."""

from __future__ import annotations

import argparse
from typing import Any

import ramet as rt

POPULATION = {"Paris": 2_100_000, "Berlin": 3_700_000, "Rome": 2_800_000, "Madrid": 3_300_000}
STEPS = 4
SHOTS = """\
Question: How many people live in Paris?
Thought: I need to look up the population of Paris.
Action: lookup[Paris]
Observation: 2100000
Thought: I know the answer now.
Action: finish[2100000]

Question: How many people live in Berlin?
Thought: I need to look up the population of Berlin.
Action: lookup[Berlin]
Observation: 3700000
Thought: I know the answer now.
Action: finish[3700000]

"""


def lookup(city: str) -> str:
    """The tool. What it returns is what the model reads, so an error is an answer too."""
    found = POPULATION.get(city.strip())
    return f"{city} is not in the table" if found is None else str(found)


@rt.function
def react(s: Any, question: str) -> str | None:
    s += SHOTS + f"Question: {question}\n"
    for step in range(STEPS):
        s += "Thought:" + rt.gen(f"thought {step}", max_tokens=24, stop="\n")
        s += "\nAction: " + rt.select(f"action {step}", ["lookup", "finish"])
        s += "[" + rt.gen(f"argument {step}", max_tokens=12, stop=["]", "\n"]) + "]\n"
        argument = s[f"argument {step}"]
        if s[f"action {step}"] == "finish":
            return argument
        s += f"Observation: {lookup(argument)}\n"
    return None  # the steps are used up


def main(backend: rt.Backend) -> None:
    state = react.run("How many people live in Rome?", backend=backend, temperature=0)
    print(state.text().removeprefix(SHOTS))
    print("answer:", state.ret_value)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", help="a running server; otherwise one is embedded")
    url = parser.parse_args().backend
    with rt.RuntimeEndpoint(url) if url else rt.Runtime() as runtime:
        main(runtime)
