"""The real tokenizer, a small vocabulary, and one compiler for all tests that need none of their
own."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from ramet.runtime.gateway.tokenizer import Tokenizer
from ramet.runtime.grammar import Compiler, Grammar, Matcher, Vocabulary
from ramet.runtime.model import store


class Walks:
    """Texts through the masks of a grammar over a vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    def allowed(self, matcher: Matcher) -> list[int]:
        row = np.full(self.vocabulary.words, -1, np.int32)
        matcher.fill(row)
        return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()

    def takes(self, grammar: Grammar, text: str) -> bool:
        """Forced tokens where there are any, else the next of the model's own; and may it end?"""
        matcher, data = grammar.matcher(), text.encode()
        while data:
            if matcher.is_done():
                return False
            forced = matcher.forced_tokens([])
            for token in forced or self.vocabulary.encode(data)[:1]:
                part = self.vocabulary.tokens[token]
                allowed = token in self.allowed(matcher)
                assert allowed or not forced, "a forced token is not in the mask"
                if not allowed or not data.startswith(part):
                    return False
                assert matcher.accept(token), "a mask allowed what is not accepted"
                data = data[len(part) :]
        return matcher.can_end()


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_files(store.resolve("smollm2-135m-instruct"))


@pytest.fixture(scope="session")
def real(tokenizer: Tokenizer) -> Vocabulary:
    """The 49,152 tokens of SmolLM2, which lack 21 single bytes."""
    return Vocabulary.from_tokenizer(tokenizer)


@pytest.fixture(scope="session")
def walks(real: Vocabulary) -> Walks:
    return Walks(real)


@pytest.fixture(scope="session")
def small() -> Vocabulary:
    """Every byte a token, some longer ones, two ends, and a width beyond them."""
    tokens = [*(bytes((i,)) for i in range(256)), b'{"', b'":', b"ab", b"", b""]
    return Vocabulary(tokens, size=300, eos_ids=[259, 260])


@pytest.fixture
def compiler(small: Vocabulary) -> Iterator[Compiler]:
    made = Compiler(small)
    yield made
    made.close()
