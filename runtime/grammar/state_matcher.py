"""Grammars whose outputs are in numbered states with a mask row each, and where one output is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from ..protocol.errors import GrammarError
from .automaton import DEAD, ByteAutomaton
from .forced import canonical_tokens, context_of
from .matcher import MaskRow
from .vocabulary import Vocabulary

MAX_ROW_BYTES = 16 << 20
"""Memory for mask rows of one grammar."""
_PLANNED = 32_768
"""Forced tokens remembered by one grammar, ..."""
_PLANNED_BYTES = 40
"""... and what each takes."""
_CONTEXT = 4
"""Tokens before forced ones that are looked at."""


class StateGrammar(ABC):
    """A regular language: states that tokens lead to, and an automaton over bytes beside them, in
    whose ``place`` each output is as well. Shared; only its caches change."""

    kind: str

    def __init__(self, automaton: ByteAutomaton, vocabulary: Vocabulary, start: int) -> None:
        self.automaton = automaton
        self.vocabulary = vocabulary
        self.start = start
        self._states: OrderedDict[int, State] = OrderedDict()
        self._kept = max(MAX_ROW_BYTES // (vocabulary.words * 4), 16)
        self._plans: OrderedDict[tuple[int, tuple[int, ...]], tuple[int, ...]] = OrderedDict()
        self._planned = 0

    @abstractmethod
    def follow(self, state: int, place: int, token: int) -> tuple[int, int] | None:
        """The state and the place behind a token of the vocabulary; None where it may not come, as
        ids without text never may."""

    @abstractmethod
    def _key(self, number: int) -> int:
        """Equal for states that are in all the same for the next token."""

    @abstractmethod
    def _make(self, number: int) -> State:
        """What `state` remembers."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """About how much memory it holds, for the cache's bound."""

    @property
    def fixed_bytes(self) -> int:
        """That of all but rows."""
        return self.automaton.nbytes + self._planned * _PLANNED_BYTES

    def check_start(self) -> None:
        """Raises `GrammarError` where nothing may come at the start."""
        state = self.state(self.start)
        if state.dead and not state.final:
            raise GrammarError("no token of the model can begin a match")

    def matcher(self) -> StateMatcher:
        """A fresh matcher at the start of an output."""
        return StateMatcher(self)

    def state(self, number: int) -> State:
        """The row and the kind of a state."""
        key = self._key(number)
        known = self._states.get(key)
        if known is not None:
            self._states.move_to_end(key)
            return known
        self._states[key] = known = self._make(number)
        if len(self._states) > self._kept:
            self._states.popitem(last=False)
        return known

    def known(self, number: int) -> State | None:
        """The same where it is known already."""
        return self._states.get(self._key(number))

    def plan(self, state: int, place: int, recent: Sequence[int]) -> tuple[int, ...]:
        """The tokens that must come from a state and its ``place``; only such as may come."""
        if place == DEAD:
            return ()
        data, behind = self.automaton.forced(place)
        if not data:
            return ()
        key = (place, context_of(self.vocabulary, recent))
        known = self._plans.get(key)
        if known is None:
            walk = self.automaton.walk
            ids = canonical_tokens(
                self.vocabulary, data, key[1], lambda more: walk(behind, more) != DEAD
            )
            known = self._agreed(state, place, ids)
            self._plans[key] = known
            self._planned += len(known) + _CONTEXT
            while self._planned > _PLANNED:
                self._planned -= len(self._plans.popitem(last=False)[1]) + _CONTEXT
        return known

    def _agreed(self, state: int, place: int, ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens up to one that may not come."""
        taken: list[int] = []
        for token in ids:
            after = self.follow(state, place, token)
            if after is None:
                break
            state, place = after
            taken.append(token)
        return tuple(taken)


class State:
    """``row``: what may come, ends included. ``final``: the text may end. ``dead``: no token may
    come but an end. ``done``: both."""

    __slots__ = ("dead", "done", "final", "row")

    def __init__(self, row: MaskRow, final: bool, dead: bool) -> None:
        self.row = row
        self.final = final
        self.dead = dead
        self.done = final and dead


class StateMatcher:
    """One output's state (``_state``) and its place in the byte automaton (``_place``).

    ``_plan``: forced tokens, of which all before ``_next`` are accepted; None where they were not
    asked for. Whether they are appended at once or come one by one through narrowed masks, they are
    the same tokens.
    """

    __slots__ = (
        "_at", "_ended", "_grammar", "_history", "_next", "_place", "_plan", "_state", "_tokens"
    )  # fmt: skip

    def __init__(self, grammar: StateGrammar) -> None:
        self._grammar = grammar
        self._state = grammar.start
        self._place = 0
        self._at: State | None = None
        """What is known of ``_state``, once that was asked."""
        self._plan: tuple[int, ...] | None = None
        self._next = 0
        self._ended = False
        self._history: list[tuple[int, int, tuple[int, ...] | None, int]] = []
        self._tokens: list[int] = []

    def row(self) -> MaskRow | None:
        """The row that `fill` would write, where the state alone says it."""
        at = self._at
        if at is None or at.dead or self._plan != () or self._ended:
            return None
        return at.row

    def fill(self, row: MaskRow) -> None:
        """Write what may come next over ``row``. Raises `GrammarError` where nothing may."""
        state = self._known_state()
        kept = state.row
        words, width = len(kept), len(row)
        if width < words:
            raise ValueError(f"a row of {words} words is needed, not {width}")
        if self._ended or (state.dead and not state.final):
            raise GrammarError("nothing may follow the output so far")
        plan = self._forced() if self._plan is None else self._plan
        if plan:
            only = plan[self._next]
            row[:] = 0
            row.view(np.uint8)[only >> 3] |= 1 << (only & 7)
            return
        if state.done and not self._grammar.vocabulary.eos_ids:
            raise GrammarError("the output is whole, and the model has no token to end it")
        if width == words:
            row[:] = kept
        else:
            row[:words] = kept
            row[words:] = 0

    def accept(self, token: int) -> bool:
        """Go on by a token. False, and nothing changed, for one that may not come."""
        grammar = self._grammar
        vocabulary = grammar.vocabulary
        if self._ended or not 0 <= token < vocabulary.size:
            return False
        if token in vocabulary.eos_ids:
            if not self._known_state().final:
                return False
            self._push(token)
            self._ended = True
            return True
        after = grammar.follow(self._state, self._place, token)
        if after is None:
            return False
        self._push(token)
        self._state, self._place = after
        self._at = None
        self._follow_plan(token)
        return True

    def passes(self, token: int, jumps: bool) -> bool:
        """Go on by a token, if the state it leads to is known, something may come there and, where
        one ``jumps`` over what is forced, no bytes must. If not, nothing has changed."""
        grammar = self._grammar
        vocabulary = grammar.vocabulary
        if self._ended or not 0 <= token < vocabulary.size:
            return False
        found = grammar.follow(self._state, self._place, token)  # which takes no ends
        if found is None:
            return False
        after, place = found
        state = grammar.known(after)
        if state is None or state.done:
            return False
        free = place == DEAD or not grammar.automaton.is_forced(place)
        if jumps and not free:
            return False
        self._push(token)
        self._state, self._place, self._at = after, place, state
        if free:
            self._plan, self._next = (), 0  # whatever came before
        else:
            self._follow_plan(token)
        return True

    def rollback(self, n: int) -> None:
        """Undo the last ``n`` accepted tokens. ValueError if there were fewer."""
        if not 0 <= n <= len(self._history):
            raise ValueError(f"cannot undo {n} of {len(self._history)} tokens")
        if n:
            self._state, self._place, self._plan, self._next = self._history[-n]
            self._at = None
            del self._history[-n:]
            del self._tokens[-n:]
            self._ended = False

    def can_end(self) -> bool:
        """Whether the output so far is whole."""
        return self._ended or self._known_state().final

    def is_done(self) -> bool:
        """Whether nothing more can come."""
        if self._ended:
            return True
        return self._known_state().done

    def forced_tokens(self, recent: Sequence[int]) -> list[int]:
        """The tokens that must come next. Only this output's own tokens are context, not
        ``recent``, so that masks, which know no others, force the same."""
        del recent
        return list(self._forced()[self._next :])

    def fork(self) -> StateMatcher:
        """A matcher in the same state that goes its own way."""
        other = StateMatcher(self._grammar)
        other._state, other._place = self._state, self._place
        other._plan, other._next = self._plan, self._next
        other._at, other._ended = self._at, self._ended
        other._history = self._history.copy()
        other._tokens = self._tokens.copy()
        return other

    def _known_state(self) -> State:
        if self._at is None:
            self._at = self._grammar.state(self._state)
        return self._at

    def _forced(self) -> tuple[int, ...]:
        if self._ended:
            return ()
        if self._plan is None:
            self._plan = self._grammar.plan(self._state, self._place, self._tokens[-_CONTEXT:])
            self._next = 0
        return self._plan

    def _follow_plan(self, token: int) -> None:
        """A token came: what is left of the plan, if it was of it."""
        plan, place = self._plan, self._next
        if plan and plan[place] == token and place + 1 < len(plan):
            self._next = place + 1
        else:
            self._plan, self._next = None, 0

    def _push(self, token: int) -> None:
        self._history.append((self._state, self._place, self._plan, self._next))
        self._tokens.append(token)
