"""Vocabularies of byte-level BPE for models that have no tokenizer: made up, or from a file."""

from __future__ import annotations

import base64
import json
import random
from itertools import pairwise
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

Merge = tuple[bytes, bytes]
LETTERS = "eeeeeeeetttttaaaaooooiiiinnnnsssshhhrrrrddllluuccmmffwgypbvkjxqz"
DIGITS = "0123456789"
MARKS = "\"\\',.:;-_/(){}[]<>=+*!?#&|$%@~^`"
LONGEST = 16


def made_up(size: int, seed: int = 0) -> tuple[list[bytes], list[Merge]]:
    """``size`` tokens and what they are merged of: the bytes, then words with and without a blank
    before them, runs of marks and of blanks, and characters of three bytes, as many of each as in
    Qwen2's vocabulary (about 60, 9 and 30 %)."""
    draw = random.Random(seed)
    tokens = [bytes((i,)) for i in range(256)]
    known = set(tokens)
    merges: list[Merge] = []
    words = [letter.encode() for letter in LETTERS + LETTERS.upper()]
    marks = [mark.encode() for mark in [*MARKS, " ", " ", "\n", "\t"]]
    wide: list[bytes] = []

    def add(left: bytes, right: bytes) -> bool:
        joined = left + right
        if joined in known or len(joined) > LONGEST or len(tokens) == size:
            return False
        known.add(joined)
        tokens.append(joined)
        merges.append((left, right))
        return True

    while len(tokens) < size:
        kind = draw.random()
        if kind < 0.45:
            # Mostly a letter more: words are as short as those of real vocabularies.
            left = draw.choice(words if draw.random() < 0.3 else words[: 1 + len(words) // 4])
            right = draw.choice(words[: len(LETTERS)])
            if add(left, right):
                words.append(left + right)
        elif kind < 0.61:
            word = draw.choice(words)
            if word[:1] != b" " and add(b" ", word):
                words.append(b" " + word)
        elif kind < 0.70:
            left, right = draw.choice(marks), draw.choice(marks)
            if add(left, right):
                marks.append(left + right)
        elif not wide or draw.random() < 0.5:
            a, b, c = (bytes((byte,)) for byte in chr(draw.randrange(0x4E00, 0x9FA6)).encode())
            add(a, b)
            if a + b in known and add(a + b, c):
                wide.append(a + b + c)
        else:
            left, right = draw.choice(wide), draw.choice(wide)
            if add(left, right):
                wide.append(left + right)
    return tokens, merges


def from_tiktoken(path: Path) -> tuple[list[bytes], list[Merge]]:
    """The tokens of a tiktoken file and the merges that its ranks mean."""
    ranks = {
        base64.b64decode(data): int(rank)
        for data, rank in (line.split() for line in path.read_bytes().splitlines() if line)
    }
    tokens = sorted(ranks, key=ranks.__getitem__)
    merges = []
    for token in tokens:
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            joined = [ranks.get(a + b, len(ranks)) for a, b in pairwise(parts)]
            at = min(range(len(joined)), key=joined.__getitem__)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append((parts[0], parts[1]))
    return tokens, merges


def write_model(folder: Path, config: Path, tokens: list[bytes], merges: list[Merge]) -> None:
    """A folder with a model's config and this tokenizer, whose ends come after all tokens.

    Weights can only be made up (``load_format="dummy"``). ValueError if the model's vocabulary is
    smaller than the tokenizer's.
    """
    settings = json.loads(config.read_text())
    if settings["vocab_size"] < len(tokens) + 2:
        raise ValueError(f"{config.name} has room for {settings['vocab_size']} tokens, no more")
    settings |= {"bos_token_id": len(tokens), "eos_token_id": len(tokens) + 1}
    shown = _characters()
    names = ["".join(shown[byte] for byte in token) for token in tokens]
    pairs = [("".join(shown[b] for b in a), "".join(shown[b] for b in c)) for a, c in merges]
    inner = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, pairs))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<bos>", "<eos>"])
    inner.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(settings))


def _characters() -> list[str]:
    """The character that stands for each byte in a tokenizer.json."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]
