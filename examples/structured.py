"""Values instead of text: what is generated must be JSON of a class, a number, or one of a few."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any, Literal

import ramet as rt

REVIEWS = [
    "The kettle boils in two minutes, but the lid broke after a week.",
    "Best lamp I ever had, warm light and easy to mount.",
    "The chair arrived late and squeaks.",
]


@dataclass
class Review:
    product: Literal["kettle", "lamp", "chair", "other"]
    liked: bool
    stars: Literal[1, 2, 3, 4, 5]
    delivery_was_on_time: bool | None


@rt.function
def read(s: Any, review: str) -> None:
    s += rt.user(f"Review: {review}\nFill in the form.")
    s += rt.assistant(
        rt.gen("form", json_schema=Review, max_tokens=64)
        + "\nWords in the review: "
        + rt.gen("words", dtype=int, max_tokens=4)
        + "\nTone: "
        + rt.gen("tone", dtype=Literal["friendly", "neutral", "angry"])
    )


def main(backend: rt.Backend) -> None:
    states = read.run_batch([(review,) for review in REVIEWS], backend=backend, temperature=0)
    for review, state in zip(REVIEWS, states, strict=True):
        print(review)
        try:
            form, words, tone = state.value("form"), state.value("words"), state.value("tone")
        except rt.ProgramError as error:  # it was cut, or the backend constrains nothing
            print(f"  no form: {error}")
            continue
        print(f"  {form.product}, {'*' * form.stars}, {tone}; it says {words} words")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", help="a running server; otherwise one is embedded")
    url = parser.parse_args().backend
    with rt.RuntimeEndpoint(url) if url else rt.Runtime() as runtime:
        main(runtime)
