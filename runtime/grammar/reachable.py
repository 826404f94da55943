"""What is left of a language when some bytes cannot be generated."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

from ..protocol.errors import GrammarError
from .charset import LAST, Ranges, complement, ranges_of
from .regex_tree import (
    NOTHING,
    Chars,
    Repeat,
    Sequence,
    Tree,
    Union,
    alphabet,
    literal,
    repeat,
    sequence,
    union,
)
from .regular import regular_tree
from .spec import Spec
from .vocabulary import Vocabulary


def reachable_tree(spec: Spec, vocabulary: Vocabulary) -> Tree:
    """The language of a spec that has a `regular_tree`, as far as the vocabulary can write it,
    behind its prefix; for `portable`. Raises `GrammarError` for a wrong spec, and where nothing is
    left."""
    whole = regular_tree(spec)
    assert whole is not None, spec.kind
    tree = without_bytes(whole, vocabulary.missing_bytes)
    if tree == NOTHING:
        raise GrammarError("every match needs bytes that no token of the model has")
    return sequence((literal(spec.prefix), tree)) if spec.prefix else tree


def without_bytes(tree: Tree, missing: Collection[int]) -> Tree:
    """The matches whose UTF-8 begins no character with a missing byte.

    Some vocabularies lack single bytes: characters that begin with one cannot be generated, and a
    pattern that could take them must not lead into a dead end.
    """
    gone = ranges_of(
        _characters_of(byte) for byte in missing if byte < 0x80 or 0xC2 <= byte <= 0xF4
    )
    if not _intersection(alphabet(tree), gone):
        return tree
    return _restricted(tree, complement(gone))


def _restricted(tree: Tree, kept: Ranges) -> Tree:
    if isinstance(tree, Chars):
        return Chars(_intersection(tree.ranges, kept))
    if isinstance(tree, Sequence):
        return sequence(_restricted(part, kept) for part in tree.parts)
    if isinstance(tree, Union):
        return union(_restricted(part, kept) for part in tree.parts)
    assert isinstance(tree, Repeat)
    return repeat(_restricted(tree.body, kept), tree.low, tree.high)


@lru_cache(maxsize=1024)
def _intersection(one: Ranges, other: Ranges) -> Ranges:
    return complement(ranges_of((*complement(one), *complement(other))))


def _characters_of(lead: int) -> tuple[int, int]:
    """First and last character whose UTF-8 begins with a byte."""
    if lead < 0x80:
        return lead, lead
    if lead < 0xE0:
        return (lead & 0x1F) << 6, (lead & 0x1F) << 6 | 0x3F
    if lead < 0xF0:
        return max((lead & 0x0F) << 12, 0x800), (lead & 0x0F) << 12 | 0xFFF
    low = max((lead & 0x07) << 18, 0x10000)
    return low, min((lead & 0x07) << 18 | 0x3FFFF, LAST)
