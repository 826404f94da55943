"""Classification with `select`: every label is scored, none is generated."""

from __future__ import annotations

import argparse
import math
from typing import Any

import ramet as rt

LABELS = ["sports", "politics", "science", "music"]
SHOTS = {
    "Striker scores twice in the cup final": "sports",
    "Parliament votes on the new budget": "politics",
    "Telescope finds water on a distant planet": "science",
    "New album tops the charts": "music",
}
HEADLINES = [
    "Champion wins the marathon in record time",
    "Minister resigns after the election",
    "Physicists measure the mass of a new particle",
    "Band announces a summer tour",
]


@rt.function(compile=True)
def classify(s: Any, headline: str) -> None:
    for known, label in SHOTS.items():
        s += f"Headline: {known}\nSection: {label}\n\n"
    s += f"Headline: {headline}\nSection: " + rt.select("label", LABELS)


def probabilities(state: Any) -> dict[str, float]:
    """The scores of the labels as a distribution over them."""
    info = state.get_meta_info("label")
    weights = [math.exp(score) for score in info["normalized_prompt_logprobs"]]
    return {label: weight / sum(weights) for label, weight in zip(info["choices"], weights)}


def main(backend: rt.Backend) -> None:
    # The function is traced once and sent whole; a batch then sends only the headlines.
    states = classify.run_batch([(headline,) for headline in HEADLINES], backend=backend)
    for headline, state in zip(HEADLINES, states, strict=True):
        label = state["label"]
        print(f"{label:>8} {probabilities(state)[label]:4.0%}  {headline}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", help="a running server; otherwise one is embedded")
    url = parser.parse_args().backend
    with rt.RuntimeEndpoint(url) if url else rt.Runtime() as runtime:
        main(runtime)
