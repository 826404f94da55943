"""Tokenizers out of GGUF files: the same ids as the tokenizers that they were made from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from ramet.runtime.gateway import gguf_tokenizer as module
from ramet.runtime.gateway.gguf_tokenizer import gguf_tokenizer
from ramet.runtime.gateway.tokenizer import Tokenizer
from ramet.runtime.model.loader.gguf import GGUFFile
from ramet.runtime.protocol.errors import ModelError
from tokenizers import Regex, normalizers, pre_tokenizers

PROBES = [
    "",
    "The quick brown fox",
    "a  12 x =   3\n\n12\t\t7",
    "def f(x):\n    return 100 + x\n",
    "it's WE'LL you're",
    "１２３ ½ 四十二",
    "né e\u0301 日本語 🦊👩‍👧",
    "  leading and trailing  ",
    "<|im_start|>user\nhi<|im_end|>",
    "2024-01-15, 3.14159; 1000000",
]
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
Write = Callable[..., GGUFFile]
texts = st.lists(st.one_of(st.sampled_from(PROBES), st.text(max_size=8)), max_size=4).map("".join)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """A GGUF that holds a tokenizer, its tokens in the order of their ids, and other values."""
    monkeypatch.setenv("RAMET_HOME", str(tmp_path / "home"))

    def write(inner: tokenizers.Tokenizer, model: str, **values: Any) -> GGUFFile:
        spec = json.loads(inner.to_str())
        vocabulary = inner.get_vocab(with_added_tokens=True)
        tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
        special = {token["content"]: token["special"] for token in spec["added_tokens"]}
        types = [3 if special.get(t) else 4 if t in special else 1 for t in tokens]
        types = [
            6 if t.startswith("<0x") and t not in special else k for t, k in zip(tokens, types)
        ]
        path = tmp_path / "tokenizer.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_tokenizer_model(model)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_bos_token_id(1)
        if model == "gpt2":
            writer.add_token_merges([" ".join(pair) for pair in spec["model"]["merges"]])
        else:
            writer.add_token_scores([-float(i) for i in range(len(tokens))])
            writer.add_unk_token_id(vocabulary["<unk>"])
        for key, value in values.items():
            if isinstance(value, bool):
                writer.add_bool(f"tokenizer.ggml.{key}", value)
            else:
                writer.add_string(f"tokenizer.ggml.{key}", value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return GGUFFile(path)

    return write


def cut_like(inner: tokenizers.Tokenizer, pre: str) -> tokenizers.Tokenizer:
    """The same vocabulary with the pre-tokenizer that a name stands for."""
    clone = tokenizers.Tokenizer.from_str(inner.to_str())
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bare = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        clone.pre_tokenizer = pre_tokenizers.Sequence([digits, plain])
    elif pre == "qwen2":
        split = pre_tokenizers.Split(Regex(QWEN), "isolated")
        clone.pre_tokenizer = pre_tokenizers.Sequence([split, bare])
        clone.normalizer = normalizers.NFC()
    elif pre == "llama-bpe":
        pattern = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        clone.pre_tokenizer = pre_tokenizers.Sequence([split, bare])
    return clone


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe", "gpt-2", None])
def test_byte_level(pre: str | None, write: Write, trained: dict[str, Any]) -> None:
    original = trained["byte_level"]
    values = {"pre": pre} if pre else {}
    inner, prefix = gguf_tokenizer(write(original, "gpt2", **values))
    expected = cut_like(original, pre or "gpt-2")
    assert prefix == ((1,) if pre == "llama-bpe" else ())
    ours = Tokenizer(inner)

    @settings(max_examples=80, deadline=None)
    @given(text=texts)
    def compare(text: str) -> None:
        if "<wide>" in text:  # a GGUF cannot say that a token eats the blanks beside it
            return
        assert ours.encode(text) == expected.encode(text, add_special_tokens=False).ids

    compare()
    assert all(
        ours.decode(ours.encode(p, special=False))
        == (p if pre != "qwen2" else normalizers.NFC().normalize_str(p))
        for p in PROBES
    )


def test_every_digit_stands_alone(write: Write, trained: dict[str, Any]) -> None:
    """Which is what a reader that ignores ``tokenizer.ggml.pre`` gets wrong."""
    smollm = Tokenizer(gguf_tokenizer(write(trained["byte_level"], "gpt2", pre="smollm"))[0])
    digits = [smollm.id(digit) for digit in "1234"]
    assert smollm.encode("1234") == digits
    assert smollm.encode("a  12")[-2:] == digits[:2]


@pytest.mark.parametrize("space", [True, False])
def test_sentencepiece(space: bool, write: Write, trained: dict[str, Any]) -> None:
    original = trained["legacy" if space else "never"]
    file = write(original, "llama", add_space_prefix=space)
    inner, prefix = gguf_tokenizer(file)
    assert prefix == (1,)
    ours = Tokenizer(inner)
    for text in PROBES:
        ids = ours.encode(text, special=False)
        data = b"".join(map(ours.token_bytes, ids))
        blank = b" " if space and text else b""
        assert data == blank + text.encode()


def test_merges_follow_the_scores(write: Write, trained: dict[str, Any]) -> None:
    """Trained pieces are numbered in the order of their merges, so the ids must come out equal."""
    original = trained["never"]
    ours = Tokenizer(gguf_tokenizer(write(original, "llama", add_space_prefix=False))[0])
    for line in ["the quick brown fox", "return x", "user assistant system", "thethe and and"]:
        assert ours.encode(line) == original.encode(line).ids


def test_the_conversion_is_kept_and_read_back(
    write: Write, trained: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(trained["never"], "llama")
    first = gguf_tokenizer(file)[0].to_str()
    (kept,) = (tmp_path / "home" / "tokenizers").iterdir()
    monkeypatch.setattr(module, "_merges_by_score", lambda _: pytest.fail("converted again"))
    assert gguf_tokenizer(file)[0].to_str() == first
    monkeypatch.undo()
    monkeypatch.setenv("RAMET_HOME", str(tmp_path / "home"))
    kept.write_text("damaged")
    assert gguf_tokenizer(file)[0].to_str() == first
    other = write(trained["never"], "llama", pre="default")
    gguf_tokenizer(other)
    assert len(list((tmp_path / "home" / "tokenizers").iterdir())) == 2


def test_a_cache_that_cannot_be_written(
    write: Write, trained: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "home").write_text("not a folder")
    assert gguf_tokenizer(write(trained["never"], "llama"))[0].encode("the").ids


def test_what_is_not_known(write: Write, trained: dict[str, Any]) -> None:
    original = trained["byte_level"]
    with pytest.raises(ModelError, match=r"unknown pre-tokenizer 'tekken'; known are .*smollm"):
        gguf_tokenizer(write(original, "gpt2", pre="tekken"))
    file = write(original, "gpt2")
    for key, value, message in [
        ("model", "bert", "unknown tokenizer 'bert'"),
        ("tokens", None, "holds no tokenizer"),
        ("tokens", [b"bytes"], "holds no tokenizer"),
        ("merges", 3, "no texts"),
        ("token_type", 3, "no numbers"),
        ("merges", ["onlyone"], "not a pair"),
        ("merges", ["not there"], "inconsistent"),
    ]:
        damaged = GGUFFile(file.path)
        damaged.metadata[f"tokenizer.ggml.{key}"] = value
        with pytest.raises(ModelError, match=message):
            gguf_tokenizer(damaged)
    spm = write(trained["never"], "llama")
    for key, value, message in [
        ("scores", None, "no score"),
        ("scores", 1.5, "no score"),
        ("unknown_token_id", 10**6, "unknown token"),
        ("bos_token_id", 10**6, "first token 1000000"),
    ]:
        damaged = GGUFFile(spm.path)
        damaged.metadata[f"tokenizer.ggml.{key}"] = value
        with pytest.raises(ModelError, match=message):
            gguf_tokenizer(damaged)
