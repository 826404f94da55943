"""A ReAct agent sent as one program: its loop and its tool, a table, run where the model runs."""

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


def look_up(s: Any) -> None:
    """The tool: text by the value that the model has written."""
    s += "Observation: "
    table = {city: str(people) for city, people in POPULATION.items()}
    s.switch(s["argument"], table, s["argument"] + " is not in the table")
    s += "\n"


def step(s: Any) -> None:
    s += "Thought:" + rt.gen("thought", max_tokens=24, stop="\n")
    s += "\nAction: " + rt.select("action", ["lookup", "finish"])
    s += "[" + rt.gen("argument", max_tokens=12, stop=["]", "\n"]) + "]\n"
    s.switch(s["action"], {"lookup": look_up})


@rt.function
def react(s: Any, question: str) -> str:
    s += SHOTS + "Question: " + question + "\n"
    s.repeat(step, STEPS, until=lambda s: rt.matches(s["action"], "finish"), count="steps")
    return s["argument"]


def main(backend: rt.Backend) -> None:
    program = react.compile()
    print(program, "\n")
    questions = [f"How many people live in {city}?" for city in ("Rome", "Madrid")]
    arguments = [{"question": question} for question in questions]
    for question, state in zip(
        questions, program.run_batch(arguments, backend=backend, temperature=0), strict=True
    ):
        print(f"{question} {state.ret_value} after {state['steps']} steps")
        for thought, action in zip(state.history("thought"), state.history("action")):
            print(f"  {thought.strip()} -> {action}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", help="a running server; otherwise one is embedded")
    url = parser.parse_args().backend
    with rt.RuntimeEndpoint(url) if url else rt.Runtime() as runtime:
        main(runtime)
