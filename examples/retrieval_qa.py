"""Questions about local text: a small BM25 index finds passages, the model reads the answer."""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from typing import Any

import ramet as rt

PASSAGES = [
    "The lighthouse of Norhaven was built in 1871 and is 34 metres tall.",
    "The ferry to Norhaven leaves the harbour at nine in the morning and costs 12 pounds.",
    "The museum of Norhaven shows ship models; it is closed on Mondays.",
    "Norhaven has one school, which 80 children attend.",
    "Every summer the people of Norhaven celebrate the herring festival with music and dancing.",
    "The baker of Norhaven is called Ole Brandt; his rye bread is known on the whole coast.",
]
QUESTIONS = [
    "When was the lighthouse built?",
    "What does the ferry cost?",
    "On which day is the museum closed?",
    "What is the name of the baker?",
]
SHOTS = """\
Text: The bridge of Oldbury was opened in 1902. The inn is at the market; a room costs 40 pounds.
Question: When was the bridge opened?
Answer: in 1902

Text: Anna Berg is the doctor of Oldbury. The library lends books to all on Fridays.
Question: Who is the doctor?
Answer: Anna Berg

Text: The mill of Oldbury stands at the river. The inn is at the market; a room costs 40 pounds.
Question: What does a room cost?
Answer: 40 pounds

"""


class BM25:
    """Ranks passages by the words they share with a question; rare words count more."""

    def __init__(self, passages: list[str], k1: float = 1.5, b: float = 0.75) -> None:
        self.passages = passages
        self.k1, self.b = k1, b
        self.counts = [Counter(words(passage)) for passage in passages]
        self.mean = sum(c.total() for c in self.counts) / len(passages)
        holders = Counter(word for counts in self.counts for word in counts)
        self.rarity = {
            word: math.log(1 + (len(passages) - n + 0.5) / (n + 0.5)) for word, n in holders.items()
        }

    def score(self, question: str, counts: Counter[str]) -> float:
        length = self.k1 * (1 - self.b + self.b * counts.total() / self.mean)
        return sum(
            self.rarity[word] * counts[word] * (self.k1 + 1) / (counts[word] + length)
            for word in words(question)
            if word in counts
        )

    def search(self, question: str, top: int) -> list[str]:
        order = sorted(
            zip(self.counts, self.passages), key=lambda pair: -self.score(question, pair[0])
        )
        return [passage for _, passage in order[:top]]


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


@rt.function
def answer(s: Any, passages: list[str], question: str) -> None:
    s += SHOTS + "Text: " + " ".join(passages)
    s += f"\nQuestion: {question}\nAnswer:" + rt.gen("answer", max_tokens=16, stop="\n")


def main(backend: rt.Backend) -> None:
    index = BM25(PASSAGES)
    found = [index.search(question, top=2) for question in QUESTIONS]
    states = answer.run_batch(
        list(zip(found, QUESTIONS, strict=True)), backend=backend, temperature=0
    )
    for question, passages, state in zip(QUESTIONS, found, states, strict=True):
        print(f"{question}\n  {state['answer'].strip()}\n  source: {passages[0]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", help="a running server; otherwise one is embedded")
    url = parser.parse_args().backend
    with rt.RuntimeEndpoint(url) if url else rt.Runtime() as runtime:
        main(runtime)
