"""A conversation of several turns: each turn finds the ones before it in the tree of KV state."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import ramet as rt

QUESTIONS = [
    "What is the capital of France?",
    "What is it famous for?",
    "Which language do people speak there?",
]


@rt.function
def chat(s: Any, questions: Sequence[str]) -> None:
    s += rt.system("You are a helpful assistant who answers in one short sentence.")
    for number, question in enumerate(questions):
        s += rt.user(question)
        # A block is the same as rt.assistant(…), for when a message is built in several steps.
        with s.assistant():
            s += rt.gen(f"answer {number}", max_tokens=40)


def main(backend: rt.Backend) -> None:
    state = chat.run(QUESTIONS, backend=backend, temperature=0)
    for message in state.messages():
        print(f"{message['role']:>9}: {message['content']}")
    for number in range(len(QUESTIONS)):
        info = state.get_meta_info(f"answer {number}")
        print(
            f"turn {number + 1}: {info['prompt_tokens']} prompt tokens, "
            f"{info['cached_tokens']} of them cached, ended by {info['finish_reason']['type']}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", help="a running server; otherwise one is embedded")
    url = parser.parse_args().backend
    with rt.RuntimeEndpoint(url) if url else rt.Runtime() as runtime:
        main(runtime)
