"""The tokenizer inside a GGUF, as a `tokenizers.Tokenizer`.

Two kinds are known. ``gpt2``: byte-level BPE, where ``tokenizer.ggml.pre`` names how text is cut
before merging; guessing it wrong gives ids that are almost right, so an unknown name is an error.
``llama``: sentencepiece BPE with byte fallback, whose merges follow from the pieces' scores.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from ..model.loader.gguf import GGUFFile
from ..model.store import home
from ..protocol.errors import ModelError

_FORMAT = "1"  # part of the cache's key: raise it when the conversion changes
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_SPACE = "\u2581"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def gguf_tokenizer(gguf: GGUFFile) -> tuple[Tokenizer, tuple[int, ...]]:
    """The tokenizer, and the ids it puts before a text. Raises `ModelError`."""
    metadata = gguf.metadata
    kind = metadata.get("tokenizer.ggml.model")
    if not _is_texts(metadata.get("tokenizer.ggml.tokens")):
        raise ModelError(f"{gguf.path} holds no tokenizer")
    if kind == "gpt2":
        tokenizer = _byte_level(gguf)
    elif kind == "llama":
        tokenizer = _cached_sentencepiece(gguf)
    else:
        raise ModelError(f"{gguf.path}: unknown tokenizer {kind!r}; known are gpt2, llama")
    return tokenizer, _prefix(metadata, kind)


def _prefix(metadata: dict[str, Any], kind: str) -> tuple[int, ...]:
    by_default = kind == "llama" or _pre(metadata) in _LLAMA3
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token", by_default) and isinstance(bos, int):
        if not 0 <= bos < len(metadata["tokenizer.ggml.tokens"]):
            raise ModelError(f"the first token {bos} of the tokenizer is not in its vocabulary")
        return (bos,)
    return ()


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _pre(metadata: dict[str, Any]) -> str:
    return str(metadata.get("tokenizer.ggml.pre") or "gpt-2")


def _byte_level(gguf: GGUFFile) -> Tokenizer:
    metadata = gguf.metadata
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = metadata.get("tokenizer.ggml.merges", [])
    if not _is_texts(merges):
        raise ModelError(f"{gguf.path}: the merges of its tokenizer are no texts")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    if any(len(pair) != 2 for pair in pairs):
        raise ModelError(f"{gguf.path}: a merge of its tokenizer is not a pair")
    pre = _pre(metadata)
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise ModelError(f"{gguf.path}: unknown pre-tokenizer {pre!r}; known are {known}")
    tokenizer = Tokenizer(_bpe(gguf, tokens, pairs, ignore_merges=pre in _LLAMA3))
    if pre in _QWEN:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_PRE_TOKENIZERS[pre]())
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, gguf)
    return tokenizer


def _bpe(gguf: GGUFFile, tokens: list[str], pairs: list[Any], **options: Any) -> BPE:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    try:
        return BPE(vocabulary, pairs, **options)
    except Exception as error:  # the library raises bare Exceptions
        raise ModelError(f"{gguf.path}: its tokenizer is inconsistent: {error}") from None


def _add_tokens(tokenizer: Tokenizer, gguf: GGUFFile) -> None:
    """Control tokens are special; user-defined ones are found in any text before it is cut."""
    tokens: list[str] = gguf.metadata["tokenizer.ggml.tokens"]
    types = gguf.metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return
    if not isinstance(types, np.ndarray):
        raise ModelError(f"{gguf.path}: the types of its tokens are no numbers")
    special: list[str | AddedToken] = []
    plain: list[str | AddedToken] = []
    for token, kind in zip(tokens, types.tolist()):
        if kind in (_CONTROL, _UNKNOWN):
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _cached_sentencepiece(gguf: GGUFFile) -> Tokenizer:
    """Deriving merges from 262,144 scores takes seconds: done once, then read back as JSON."""
    path = home() / "tokenizers" / f"{_key(gguf)}.json"
    if path.is_file():
        try:
            return Tokenizer.from_file(str(path))
        except Exception:  # a damaged cache is made anew, as if it were not there
            path.unlink(missing_ok=True)
    tokenizer = _sentencepiece(gguf)
    _keep(tokenizer, path)
    return tokenizer


def _key(gguf: GGUFFile) -> str:
    """A digest of everything before the first tensor's data: the vocabulary is in there."""
    header_end = min((tensor.start for tensor in gguf.tensors.values()), default=0)
    digest = hashlib.sha256(_FORMAT.encode())
    digest.update(memoryview(gguf.buffer)[: header_end or len(gguf.buffer)])
    return digest.hexdigest()[:32]


def _keep(tokenizer: Tokenizer, path: Path) -> None:
    """Best effort: without a writable cache the next start is slow again, no more."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
        os.close(handle)
        temporary = Path(name)
        try:
            tokenizer.save(name, pretty=False)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError:
        return


def _sentencepiece(gguf: GGUFFile) -> Tokenizer:
    metadata = gguf.metadata
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if not isinstance(unknown, int) or not 0 <= unknown < len(tokens):
        raise ModelError(f"{gguf.path}: its unknown token {unknown} is not in its vocabulary")
    model = _bpe(
        gguf,
        tokens,
        _merges_by_score(gguf),
        unk_token=tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    replace = normalizers.Replace(" ", _SPACE)
    back = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace])
        tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = replace
        tokenizer.decoder = decoders.Sequence(back)
    _add_tokens(tokenizer, gguf)
    return tokenizer


def _merges_by_score(gguf: GGUFFile) -> list[tuple[str, str]]:
    """Every way to put a piece together from two pieces, pieces of the highest score first."""
    metadata = gguf.metadata
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    scores = metadata.get("tokenizer.ggml.scores")
    types = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(scores, np.ndarray) or not isinstance(types, np.ndarray):
        raise ModelError(f"{gguf.path}: its tokenizer has no scores or no types")
    if not len(scores) == len(types) == len(tokens):
        raise ModelError(f"{gguf.path}: its tokenizer has no score and type for every token")
    normal = {token for token, kind in zip(tokens, types.tolist()) if kind == 1}
    order = (-scores.astype(np.float64)).argsort(kind="stable").tolist()
    merges: list[tuple[str, str]] = []
    for number in order:
        piece = tokens[number]
        if piece not in normal:
            continue
        for cut in range(1, len(piece)):
            left = piece[:cut]
            if left in normal and (right := piece[cut:]) in normal:
                merges.append((left, right))
    return merges


def _digits_then_words() -> list[Any]:
    """Every digit by itself, then GPT-2's cut, which would take a blank along with them."""
    return [pre_tokenizers.Digits(individual_digits=True), *_gpt2_words()]


def _gpt2_words() -> list[Any]:
    return [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]


def _split_by(numbers: str) -> list[Any]:
    pattern = "|".join((_CONTRACTIONS, _WORDS, numbers, _SIGNS, _BLANKS))
    return [
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


def _single_numbers() -> list[Any]:
    return _split_by(r"\p{N}")


def _triple_numbers() -> list[Any]:
    return _split_by(r"\p{N}{1,3}")


_LLAMA3 = frozenset({"llama-bpe", "llama3", "llama-v3"})
_QWEN = frozenset({"qwen2", "deepseek-r1-qwen"})
_PRE_TOKENIZERS = {
    "smollm": _digits_then_words,
    "gpt-2": _gpt2_words,
    "default": _gpt2_words,
    **dict.fromkeys(_QWEN, _single_numbers),
    **dict.fromkeys(_LLAMA3, _triple_numbers),
}
