"""Tokenizers small enough to train in a moment, one of each kind."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import tokenizers
from ramet.runtime.gateway.tokenizer import Tokenizer
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

CORPUS = [
    "The quick brown fox jumps over the lazy dog, 1234 times in 56 days.",
    "héllo wörld — naïve café, Straße 42; 日本語のテキスト と 中文。",
    "def f(x):\n    return x + 1\n\n\nclass A:\n\tpass\n",
    "user assistant system turn user assistant the the the and and",
] * 4
SPECIALS = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<|im|>"]
SPACE = "\u2581"


def _train(inner: tokenizers.Tokenizer, alphabet: list[str], specials: list[str]) -> None:
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=specials, show_progress=False
    )
    inner.train_from_iterator(CORPUS, trainer)


def byte_level() -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    inner.decoder = decoders.ByteLevel()
    _train(inner, pre_tokenizers.ByteLevel.alphabet(), SPECIALS)
    inner.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    inner.add_special_tokens([AddedToken("<wide>", special=True, lstrip=True, rstrip=True)])
    return inner


def sentencepiece(scheme: str) -> tokenizers.Tokenizer:
    """``legacy`` puts a blank before every run, ``first`` before the text only, ``never``: none."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    inner = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    back: list[decoders.Decoder] = [
        decoders.Replace(SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if scheme == "first":
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        replace = normalizers.Replace(" ", SPACE)
        prepend = [normalizers.Prepend(SPACE)] if scheme == "legacy" else []
        inner.normalizer = normalizers.Sequence([*prepend, replace])
    if scheme != "never":
        back.append(decoders.Strip(" ", 1, 0))
    inner.decoder = decoders.Sequence(back)
    _train(inner, [SPACE, *"abcdefghijklmnopqrstuvwxyz"], ["<unk>", *SPECIALS, *pieces])
    # Trained as special so that they are in the vocabulary; byte pieces are no such thing.
    spec = inner.to_str()
    return _without_added(spec, set(pieces))


def _without_added(spec: str, contents: set[str]) -> tokenizers.Tokenizer:
    import json

    data = json.loads(spec)
    data["added_tokens"] = [t for t in data["added_tokens"] if t["content"] not in contents]
    return tokenizers.Tokenizer.from_str(json.dumps(data))


MAKERS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level": byte_level,
    "legacy": lambda: sentencepiece("legacy"),
    "first": lambda: sentencepiece("first"),
    "never": lambda: sentencepiece("never"),
}


@pytest.fixture(scope="session")
def trained() -> dict[str, tokenizers.Tokenizer]:
    """The library's tokenizers, by kind."""
    return {kind: make() for kind, make in MAKERS.items()}


@pytest.fixture(scope="session", params=list(MAKERS))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def library(kind: str, trained: dict[str, tokenizers.Tokenizer]) -> tokenizers.Tokenizer:
    """The library's own behaviour: finds special tokens in every text."""
    return copy.deepcopy(trained[kind])


@pytest.fixture(scope="session")
def tokenizer(kind: str, trained: dict[str, tokenizers.Tokenizer]) -> Tokenizer:
    return Tokenizer(copy.deepcopy(trained[kind]))


@pytest.fixture(scope="session")
def byte_tokenizer(trained: dict[str, tokenizers.Tokenizer]) -> Tokenizer:
    """Byte level, with a first token that goes before every text."""
    inner = copy.deepcopy(trained["byte_level"])
    inner.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", inner.token_to_id("<|bos|>"))]
    )
    return Tokenizer(inner, prefix=[inner.token_to_id("<|bos|>")])
