"""What every compiled constraint can do, whichever library compiled it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

MaskRow = npt.NDArray[np.int32]
"""[ceil(vocabulary size / 32)] int32: bit ``i % 32`` of word ``i // 32`` set where id i is
allowed."""


class Grammar(Protocol):
    """A compiled spec: immutable, shared by all requests that ask for it."""

    @property
    def kind(self) -> str:
        """Name of the backend that compiled it."""
        ...

    @property
    def nbytes(self) -> int:
        """About how much memory it holds, for the cache's bound."""
        ...

    def matcher(self) -> Matcher:
        """A fresh matcher at the start of an output."""
        ...


class Matcher(Protocol):
    """Where one output is in its grammar. Not for two threads at once.

    Any method may raise `GrammarError` where the library behind it hit a limit; the request then
    fails, nothing else does.
    """

    def fill(self, row: MaskRow) -> None:
        """Write which ids may come next over all of ``row``. Ids that end an answer are set where
        `can_end`. Where the next bytes are forced, only their canonical token is allowed. Never
        leaves a row without a bit: raises `GrammarError` instead."""
        ...

    def row(self) -> MaskRow | None:
        """What `fill` would write, where that is kept and `fill` would raise nothing: of outputs
        alike it is the same object, not to be changed. None: `fill` says it. Never raises."""
        ...

    def accept(self, token: int) -> bool:
        """Go on by a token; an id that ends an answer is taken where `can_end`. False, and nothing
        changed, for one the grammar does not take."""
        ...

    def passes(self, token: int, jumps: bool) -> bool:
        """Go on by a token where it is known at once that `accept` takes it, that the output is not
        done then and, where one ``jumps`` over what is forced, that nothing is. If not, nothing has
        changed: False says no more than that. Never raises."""
        ...

    def rollback(self, n: int) -> None:
        """Undo the last ``n`` accepted tokens, ends included. ValueError if there were fewer."""
        ...

    def can_end(self) -> bool:
        """Whether the output so far is whole."""
        ...

    def is_done(self) -> bool:
        """Whether nothing more can come: an end was accepted, or the output is whole and no text
        may follow."""
        ...

    def forced_tokens(self, recent: Sequence[int]) -> list[int]:
        """The tokens that must come next whatever the model says, in its own tokenization, minus
        trailing ones that a longer allowed token could span. ``recent``: the last ids before here,
        a hint. Accepts nothing: the caller appends the tokens and accepts each. Never holds an end.
        """
        ...

    def fork(self) -> Matcher:
        """A matcher in the same state that goes its own way."""
        ...
