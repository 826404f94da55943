"""A grammar and its matchers on llguidance, whose errors are silent unless asked for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from ctypes import addressof, c_int32
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ..protocol.errors import GrammarError
from .lexers import Growth, Lexer, Lexers
from .library_error import check
from .mask_cache import MaskCache, Place
from .matcher import MaskRow
from .vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_ROW_BYTES = 16 << 20
"""Memory for mask rows of one grammar."""
MOST_READ = 256
"""Tokens of an output that may be read again so that it has a lexer of fewer."""
CALL_SECONDS = 0.005
"""What a call of the library may take. What it takes longer is owed; quicker ones pay it back."""
MOST_OWED = 1.0
"""Seconds that an output may owe: all others wait while it is followed."""
_INT32 = np.dtype(np.int32)
_T = TypeVar("_T")


class LLGuidanceGrammar:
    """Lexers, whose starts every request copies, and the rows that were computed.

    ``make`` makes a matcher of the library with a lexer of its own; ``nbytes`` is what one takes;
    ``growth`` makes more of them, up to ``lexers``, None for as many as are of use.
    """

    kind = "llguidance"

    def __init__(
        self,
        make: Callable[[], LLMatcher],
        vocabulary: Vocabulary,
        nbytes: int,
        growth: Growth | None = None,
        lexers: int | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self.lexers = Lexers(make, nbytes, growth or Growth(), lexers)
        self.rows = MaskCache(MAX_ROW_BYTES)

    @property
    def nbytes(self) -> int:
        """With the rows and the lexers it holds at the moment."""
        return self.lexers.nbytes + self.rows.nbytes

    def matcher(self) -> LLGuidanceMatcher:
        """A fresh matcher."""
        return LLGuidanceMatcher(self, self._vocabulary)


class LLGuidanceMatcher:
    """llguidance's matcher, with ends counted here and its error state asked for after every call:
    in that state it would allow nothing but an end, and a broken output would look whole.

    Along tokens that another output took before, the library is not asked: what it said then is
    known. It reads them when it is asked something next.
    """

    def __init__(self, grammar: LLGuidanceGrammar, vocabulary: Vocabulary) -> None:
        self._grammar = grammar
        self.lexer = grammar.lexers.take()
        self._inner = self.lexer.copy(self)
        self._unread = 0
        """The last so many tokens, which the library has yet to read."""
        self._stays = False
        self._vocabulary = vocabulary
        self._words = vocabulary.words
        self._ends = vocabulary.eos_ids
        self._tokens: list[int] = []
        self._places: list[Place] = [grammar.rows.start]
        """Where the output was after each token, up to where the grammar's rows end."""
        self._ended = False
        self._owed = 0.0
        self.slow = False
        """Whether it may have taken long of late. Then what is computed for it is measured, which
        takes microseconds, and can be only while nothing else is computed beside it."""

    @property
    def inner(self) -> LLMatcher:
        """The library's own, where the output is. Raises `GrammarError` if it cannot get there."""
        if self._unread:
            self._inner.consume_tokens(self.take_unread())
            if self._inner.is_error():
                self.begin_anew()
        return self._inner

    def take_unread(self) -> list[int]:
        """The tokens that the library has yet to read: the caller has it read them now."""
        unread, self._unread = self._unread, 0
        return self._tokens[-unread:] if unread else []

    def row(self) -> MaskRow | None:
        """The row of where the output is, if it is kept whole."""
        place = None if self._ended else self.place
        if place is None or isinstance(place.row, tuple):
            return None
        return place.row

    def fill(self, row: MaskRow) -> None:
        words = self._words
        if len(row) != words or row.dtype != _INT32 or row.strides != (4,):
            raise ValueError(f"a mask row is {words} contiguous int32, not {row.dtype} {row.shape}")
        if self.computes(row):
            self._compute(row)
            self.filled(row)

    def computes(self, row: MaskRow) -> bool:
        """Whether the library has yet to compute ``row``, which is contiguous and as wide as the
        vocabulary; if not, it is filled now. Together with `filled`, and the library's work on
        `inner` in between, this is `fill`."""
        if self._ended:
            self._fill_ends(row)
            return False
        place = self.place
        if place is not None and self._grammar.rows.copy(place, row):
            return False
        if not self._ends:
            self._fill_endless(row)
            self._keep(row)
            return False
        return True

    def filled(self, row: MaskRow) -> None:
        """The library has computed ``row``, or failed."""
        if self._inner.is_error():
            self._again(lambda: self._compute(row))
        self._keep(row)

    def _compute(self, row: MaskRow) -> None:
        # A tenth of the time of row.ctypes.data.
        address = addressof(c_int32.from_buffer(row))  # type: ignore[arg-type]
        inner, began, computed = self.inner, perf_counter(), self._computed
        inner.unsafe_compute_mask_ptr(address, 4 * self._words)
        self._spend(began, computed)

    @property
    def _computed(self) -> float:
        return thread_time() if self.slow else 0.0

    def _spend(self, began: float, computed: float) -> None:
        """A call of the library began then, when the thread had computed for so long. Raises
        `GrammarError` if too much is owed by that."""
        if not self.slow:
            self.slow = perf_counter() - began > CALL_SECONDS  # or others were let compute
            return
        seconds = thread_time() - computed
        self._owed = max(self._owed + seconds - CALL_SECONDS, 0.0)
        self.slow = self._owed > 0
        if self._owed > MOST_OWED:
            took = f"{seconds * 1000:.0f} ms for a token"
            raise GrammarError(f"the grammar is too ambiguous: this output takes {took}")

    @property
    def place(self) -> Place | None:
        """Where the output is among those whose rows may be kept."""
        places = self._places
        return places[-1] if places and places[0] is self._grammar.rows.start else None

    def _keep(self, row: MaskRow) -> None:
        place = self.place
        if place is not None:
            self._grammar.rows.keep(place, row)

    def _fill_ends(self, row: MaskRow) -> None:
        if not self._ends:
            raise GrammarError("the output is whole, and the vocabulary has no id to end it with")
        row[:] = self._vocabulary.ends_row

    def _fill_endless(self, row: MaskRow) -> None:
        """The tokenizer given to the library ends with a made-up end, cut off here."""
        mask = self.inner.compute_bitmask()
        if self._inner.is_error():
            mask = self._again(lambda: self._inner.compute_bitmask())
        row[:] = np.frombuffer(mask, np.int32)[: len(row)]
        if self._vocabulary.size & 31:
            row[-1] &= np.int32((1 << (self._vocabulary.size & 31)) - 1)
        if not row.any():
            raise GrammarError("no token may follow, and the vocabulary has no id to end with")

    def accept(self, token: int) -> bool:
        place = self._known(token)
        if place is not None:
            self._pass(token, place)
            return True
        if not self.asks_library(token):
            if not self._ended and token in self._ends:
                self._ended = self.can_end()
                return self._ended
            return False
        inner, began, computed = self.inner, perf_counter(), self._computed
        taken = inner.try_consume_tokens([token])
        self._spend(began, computed)
        if self._inner.is_error() or (not taken and self.lexer.is_worn()):
            taken = self._again(lambda: self._inner.try_consume_tokens([token]))
        if taken:
            self.took(token)
        return taken == 1

    def passes(self, token: int, jumps: bool) -> bool:
        """Go on by a token, if it is known that it may come, and that behind it something may and,
        where one ``jumps`` over what is forced, nothing must. If not, nothing has changed."""
        place = self._known(token)
        if place is None or place.done is not False or (jumps and place.forced != ()):
            return False
        self._pass(token, place)
        return True

    def _known(self, token: int) -> Place | None:
        """Where the token leads, if another output took it here."""
        place = self.place
        return None if place is None or self._ended else place.after.get(token)

    def _pass(self, token: int, place: Place) -> None:
        self._tokens.append(token)
        self._places.append(place)
        self._unread += 1

    def asks_library(self, token: int) -> bool:
        """Whether it is for the library to say if ``token`` may come."""
        known = 0 <= token < self._vocabulary.size and bool(self._vocabulary.tokens[token])
        if not known or self._ended or token in self._ends:
            return False
        return self._known(token) is None

    def took(self, token: int) -> None:
        """The library has gone on by ``token``: the rest of `accept`."""
        self._tokens.append(token)
        place = self._grammar.rows.next(self._places, token)
        if place is None:
            self._places.clear()
        else:
            self._places.append(place)

    def rollback(self, n: int) -> None:
        taken = len(self._tokens) + self._ended
        if not 0 <= n <= taken:
            raise ValueError(f"cannot undo {n} of {taken} tokens")
        if not n:
            return
        back = n - self._ended
        self._ended = False
        if back:
            del self._tokens[-back:], self._places[-back:]
            read = max(back - self._unread, 0)
            self._unread = max(self._unread - back, 0)
            if read:  # the library's own way back may leave it the mask of where it was
                self._inner, self._unread = self.lexer.copy(self), len(self._tokens)

    def can_end(self) -> bool:
        return self._ended or self.inner.is_accepting()

    def is_done(self) -> bool:
        if self._ended:
            return True
        place = self.place
        if place is not None and place.done is not None:
            return place.done
        done = self.inner.is_stopped()
        if done:
            if self._inner.is_error():
                self.begin_anew()
            done = self._inner.is_stopped() and self._inner.is_accepting()
        if place is not None:
            place.done = done
        return done

    def forced_tokens(self, recent: Sequence[int]) -> list[int]:  # noqa: ARG002
        if self.is_done():
            return []
        place = self.place
        if place is not None and place.forced is not None:
            return list(place.forced)
        tokens = self.inner.compute_ff_tokens()
        # Of a worn lexer the library says that nothing must come.
        if self._inner.is_error() or (not tokens and self.lexer.is_replaced()):
            tokens = self._again(lambda: self._inner.compute_ff_tokens())
        for i, token in enumerate(tokens):
            if token >= self._vocabulary.size or token in self._ends:
                del tokens[i:]
                break
        if place is not None:
            self._grammar.rows.keep_forced(place, tokens)
        return tokens

    def fork(self) -> LLGuidanceMatcher:
        twin = copy.copy(self)
        twin.lexer.users.add(twin)
        twin._inner = self._inner.deep_copy()
        twin._tokens = self._tokens.copy()
        twin._places = self._places.copy()
        return twin

    def begin_anew(self) -> bool:
        """After an error, which the library never leaves, or where it may have gone on by more than
        was accepted: the same tokens with another lexer. Whether that is used by nobody else yet.
        Raises `GrammarError` if that fails with such a one."""
        while True:
            fresh, made = self._grammar.lexers.renew(self.lexer)
            self.lexer.users.discard(self)
            self.lexer, self._inner, self._unread = fresh, fresh.copy(self), 0
            if self._tokens:
                self._inner.consume_tokens(self._tokens)
            if made or not self._inner.is_error():
                check(self._inner)
                return made

    def _again(self, call: Callable[[], _T]) -> _T:
        """What ``call`` says with another lexer: at last with one that nobody has worn out before.
        Raises `GrammarError` if it fails with that."""
        while True:
            made = self.begin_anew()
            said = call()
            if not self._inner.is_error() and (said != 0 or made or not self.lexer.is_worn()):
                return said
            if made:
                check(self._inner)
                return said

    def move(self, lexer: Lexer) -> int:
        """Go on with another lexer, if the output is short enough to be read again and that meets
        no limit; how many tokens that took. Masks, ends and places stay what they are."""
        if self._stays or len(self._tokens) > MOST_READ:
            return 0
        inner = lexer.copy(self)
        if self._tokens:
            inner.consume_tokens(self._tokens)
        if inner.is_error():
            lexer.users.discard(self)
            self._stays = True
        else:
            self.lexer.users.discard(self)
            self.lexer, self._inner, self._unread = lexer, inner, 0
        return len(self._tokens)
