"""Few-shot question answering over a batch: the shared examples are computed once.

python examples/few_shot_qa.py [--backend tcp://127.0.0.1:7411]
"""

from __future__ import annotations

import argparse
from typing import Any

import ramet as rt

SHOTS = {
    "What is the capital of France?": "Paris",
    "What is the capital of Japan?": "Tokyo",
    "What is the capital of Germany?": "Berlin",
}
QUESTIONS = [f"What is the capital of {c}?" for c in ("Italy", "Spain", "Egypt", "Greece")]


@rt.function
def few_shot_qa(s: Any, question: str) -> None:
    for known, answer in SHOTS.items():
        s += f"Q: {known}\nA: {answer}\n"
    # No blank after A:, the model's next token begins with one, and `ask` strips it.
    s += f"Q: {question}\nA:" + rt.gen("answer", max_tokens=8, stop="\n")


def ask(backend: rt.Backend, questions: list[str]) -> list[str]:
    """One answer a question, in order. The questions run side by side."""
    states = few_shot_qa.run_batch([(q,) for q in questions], backend=backend, temperature=0)
    return [state["answer"].strip() for state in states]


def main(backend: rt.Backend) -> None:
    few_shot_qa.cache(backend)  # prefill the shots before the first question comes
    for question, answer in zip(QUESTIONS, ask(backend, QUESTIONS), strict=True):
        print(f"{question} {answer}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", help="a running server; otherwise one is embedded")
    url = parser.parse_args().backend
    with rt.RuntimeEndpoint(url) if url else rt.Runtime() as runtime:
        main(runtime)
