"""Small vocabularies, a real one, random regexes, and walks over what masks allow."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from ramet.runtime.gateway.tokenizer import Tokenizer
from ramet.runtime.grammar.automaton_backend import AutomatonBackend
from ramet.runtime.grammar.matcher import Grammar, Matcher
from ramet.runtime.grammar.outlines_backend import OutlinesBackend
from ramet.runtime.grammar.spec import Spec
from ramet.runtime.grammar.vocabulary import Vocabulary
from ramet.runtime.model import store

LETTERS = ["a", "b", "B", "0", " ", "\n", "é", "😀"]


def allowed(matcher: Matcher, vocabulary: Vocabulary) -> set[int]:
    """The ids that a filled row allows."""
    row = np.full(vocabulary.words, -1, np.int32)
    matcher.fill(row)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


class Walks:
    """Walks of texts and tokens through the masks of a backend's grammars."""

    def __init__(self, backend: OutlinesBackend | AutomatonBackend) -> None:
        self.allowed = allowed
        self.backend = backend

    def takes(self, grammar: Grammar, vocabulary: Vocabulary, text: str) -> bool:
        """Whether a text is produced through the masks: forced tokens where there are any, else
        the next of the model's own."""
        matcher, data = grammar.matcher(), text.encode()
        while data:
            forced = matcher.forced_tokens([])
            try:
                ids = forced or vocabulary.encode(data)[:1]
            except Exception:
                return False
            for token in ids:
                part = vocabulary.tokens[token]
                if token not in allowed(matcher, vocabulary) or not data.startswith(part):
                    return False
                assert matcher.accept(token), "a mask allowed what is not accepted"
                data = data[len(part) :]
        return matcher.can_end()

    def compile(self, pattern: str | Sequence[str], vocabulary: Vocabulary) -> Grammar:
        kind = "regex" if isinstance(pattern, str) else "choice"
        return self.backend.compile(Spec.of(kind, pattern), vocabulary)


class RandomRegex:
    """Patterns of most of the dialect, over few letters so that short texts match often."""

    ATOMS = (
        *("a", "b", "B", "0", "é", "😀", " ", "ab", "a", "b", "aé") * 3,
        *("[ab]", "[^a]", "[a-bé]", "[^\\n0]", ".", "[^é😀]") * 2,
        *(r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", r"[\d\s]", r"[^\w]", r"\n", r"\x61", r"\u00e9"),
    )

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def pattern(self) -> str:
        body = self.part(3)
        flags = self.random.choice(["", "", "", "", "(?i)", "(?s)", "(?a)", "(?si)"])
        anchors = self.random.choice([("", "")] * 5 + [("^", "$"), ("^", ""), (r"\A", r"\Z")])
        if anchors != ("", ""):
            body = f"(?:{body})"
        return flags + anchors[0] + body + anchors[1]

    def part(self, depth: int) -> str:
        pick = self.random.random
        kind = pick()
        if depth == 0 or kind < 0.3:
            return self.random.choice(self.ATOMS)
        inner = self.part(depth - 1)
        if kind < 0.55:
            return inner + self.part(depth - 1)
        group = self.random.choice(["(", "(?:", "(", "(?i:", "(?s:"])
        if kind < 0.75:
            other = self.random.choice([self.part(depth - 1), self.part(depth - 1), ""])
            return f"{group}{inner}|{other})"
        times = self.random.choice(["?", "*", "+", "{2}", "{1,2}", "{0,3}", "{2,}", "{,2}"])
        return f"{group}{inner}){times}{'?' if pick() < 0.3 else ''}"


@pytest.fixture
def allowed_ids() -> Callable[[Matcher, Vocabulary], set[int]]:
    return allowed


@pytest.fixture(params=[OutlinesBackend, AutomatonBackend], ids=lambda backend: backend.name)
def walks(request: pytest.FixtureRequest) -> Walks:
    """With each backend whose grammars have states."""
    return Walks(request.param())


@pytest.fixture
def random_regexes() -> Callable[[int], RandomRegex]:
    return RandomRegex


@pytest.fixture(scope="session")
def letters() -> Vocabulary:
    """Tokens of one letter, of several, of parts of letters, two equal ones; an end."""
    tokens = [letter.encode() for letter in LETTERS]
    tokens += [b"ab", b"ba", b"aab", b"a\xc3", b"\xf0\x9f", b"\x98\x80", b"\xa9a", b"ab"]
    tokens += [b"#a", *(bytes((byte,)) for byte in b"!#$%&()*+,-./:;<=>?")]
    tokens += [bytes((byte,)) for byte in (*range(0x80, 0xC0), *range(0xC2, 0xF5))]
    return Vocabulary([*tokens, b""], size=len(tokens) + 9, eos_ids=[len(tokens)])


@pytest.fixture(scope="session")
def single_bytes() -> Vocabulary:
    """Every byte a token, and nothing else but an end."""
    return Vocabulary([*(bytes((i,)) for i in range(256)), b""], eos_ids=[256])


@pytest.fixture(scope="session")
def tokenizer_of_real() -> Tokenizer:
    return Tokenizer.from_files(store.resolve("smollm2-135m-instruct"))


@pytest.fixture(scope="session")
def real(tokenizer_of_real: Tokenizer) -> Vocabulary:
    """The 49,152 tokens of SmolLM2, which lack 21 single bytes."""
    return Vocabulary.from_tokenizer(tokenizer_of_real)
