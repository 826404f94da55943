"""Regexes and choices by outlines-core's index: one packed mask row per state of its automaton.

The index matches by the first alternative that fits and drops some states, so a pattern goes in
behind a marker and before ``\\z``: that takes away early matches, and the marker lets the pattern
match the empty text. Every matcher starts behind it. What is not small (an index grows with states
times vocabulary, and cannot be stopped while it is built) is refused before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
import outlines_core

from ..protocol.errors import GrammarError
from .automaton import DEAD, ByteAutomaton, TooLarge, build
from .backend import Refused
from .charset import contains
from .checks_regex import language_of
from .forced import canonical_tokens
from .matcher import MaskRow
from .reachable import reachable_tree
from .regex_tree import Tree, alphabet, literal, portable
from .spec import Spec
from .vocabulary import Vocabulary

MAX_INDEX_BYTES = 8 << 20
MAX_SIZE = 2_000
"""Characters of a pattern with its repeats written out."""
MAX_STATES = 2_000
MAX_STATES_TIMES_TOKENS = 20_000_000
"""An index takes about 0.1 microseconds for each token in each state: two seconds."""
_BYTES_OF_A_WAY = 12
"""Of an index, for each token in each state."""
_ROW_BYTES = 16 << 20
"""Memory for mask rows of one grammar."""
_PLANS = 4_096
"""Forced tokens remembered by one grammar."""
_LONG_MARKER = 16
_CONTEXT = 4
"""Tokens before forced ones that are looked at."""


class OutlinesBackend:
    """Compiles ``regex`` and ``choice``. Stateless but for the library's form of vocabularies."""

    name = "outlines"

    def supports(self, spec: Spec) -> str | None:
        """Why the spec is not for this backend, or None. Raises `GrammarError` for a wrong one."""
        if spec.kind not in ("regex", "choice"):
            return f"outlines takes regexes and choices, not {spec.kind}"
        size = language_of(spec).size
        if size > MAX_SIZE:
            return f"the pattern has {size:,} characters when written out, over {MAX_SIZE:,}"
        return None

    def try_in_worker(self, spec: Spec, vocabulary: Vocabulary) -> bytes:
        """The index and the byte automaton as bytes. Raises `GrammarError`, and `Refused` for what
        would be too large."""
        reason = self.supports(spec)
        if reason is not None:
            raise Refused(reason)
        tree = reachable_tree(spec, vocabulary)
        tokens = len(vocabulary.ids_of_bytes)
        try:
            most = min(MAX_STATES, MAX_STATES_TIMES_TOKENS // max(tokens, 1))
            automaton = build(tree, max(most, 64))
        except TooLarge as error:
            raise Refused(str(error)) from None
        if automaton.wide_states() * tokens * _BYTES_OF_A_WAY > MAX_INDEX_BYTES:
            raise Refused("the index would be larger than 8 MB")
        marker = _marker(tree, vocabulary)
        pattern = f"{portable(literal(marker))}(?:{portable(tree)})\\z"
        try:
            index = outlines_core.Index(pattern, _library_form(vocabulary))
        except ValueError as error:  # its message holds the whole pattern
            kind = str(error).split(":")[0][:80]
            raise Refused(f"outlines-core cannot build it for this vocabulary ({kind})") from None
        data: bytes = index.__reduce__()[1][0]
        if len(data) > MAX_INDEX_BYTES:
            raise Refused(f"the index has {len(data) >> 20} MB, over 8")
        return msgspec.msgpack.encode((data, automaton.pack(), marker.encode()))

    def finish(self, spec: Spec, vocabulary: Vocabulary, data: bytes) -> OutlinesGrammar:
        """The grammar from `try_in_worker`'s bytes. Raises `GrammarError`."""
        del spec
        packed, automaton, marker = msgspec.msgpack.decode(data, type=tuple[bytes, bytes, bytes])
        index = outlines_core.Index.from_binary(packed)
        start: int | None = index.get_initial_state()
        for byte in marker:
            token = vocabulary.ids_of_bytes[bytes((byte,))]
            start = None if start is None else index.get_next_state(start, token)
        if start is None:
            raise GrammarError("outlines-core's index does not begin as its pattern does")
        form = ByteAutomaton.unpack(automaton)
        return OutlinesGrammar(index, start, form, vocabulary, len(packed))

    def compile(self, spec: Spec, vocabulary: Vocabulary) -> OutlinesGrammar:
        """Both halves here, with no deadline: for tests and trusted specs."""
        return self.finish(spec, vocabulary, self.try_in_worker(spec, vocabulary))


class OutlinesGrammar:
    """An index with its rows. Shared; only its caches change."""

    kind = "outlines"

    def __init__(
        self,
        index: outlines_core.Index,
        start: int,
        automaton: ByteAutomaton,
        vocabulary: Vocabulary,
        index_bytes: int,
    ) -> None:
        self.index = index
        self.start = start
        self.automaton = automaton
        self.vocabulary = vocabulary
        self._index_bytes = index_bytes
        self._rows: OrderedDict[int, _State] = OrderedDict()
        self._kept = max(_ROW_BYTES // (vocabulary.words * 4), 16)
        self._plans: OrderedDict[tuple[int, tuple[int, ...]], tuple[int, ...]] = OrderedDict()
        state = self.state(start)
        if state.dead and not state.final:
            raise GrammarError("no token of the model can begin a match")

    @property
    def nbytes(self) -> int:
        """With room for the rows it may come to hold."""
        rows = min(self.automaton.states, self._kept) * self.vocabulary.words * 4
        return self._index_bytes * 2 + self.automaton.nbytes + rows

    def matcher(self) -> OutlinesMatcher:
        """A fresh matcher at the start of an output."""
        return OutlinesMatcher(self)

    def state(self, number: int) -> _State:
        """The row and the kind of a state of the index."""
        known = self._rows.get(number)
        if known is not None:
            self._rows.move_to_end(number)
            return known
        vocabulary = self.vocabulary
        allowed = np.array(self.index.get_allowed_tokens(number) or (), np.int64)
        allowed = allowed[allowed < vocabulary.size]
        bits = np.zeros(vocabulary.words * 32, np.bool_)
        bits[allowed] = True
        final = self.index.is_final_state(number)
        if final:
            bits[list(vocabulary.eos_ids)] = True
        row = np.packbits(bits, bitorder="little").view(np.int32)
        row.flags.writeable = False
        self._rows[number] = known = _State(row, final, allowed.size == 0)
        if len(self._rows) > self._kept:
            self._rows.popitem(last=False)
        return known

    def plan(self, state: int, place: int, recent: Sequence[int]) -> tuple[int, ...]:
        """The tokens that must come from a state of the index and the automaton's ``place``; only
        such as the index takes too."""
        if place == DEAD:
            return ()
        data, behind = self.automaton.forced(place)
        if not data:
            return ()
        key = (place, tuple(recent[-_CONTEXT:]))
        known = self._plans.get(key)
        if known is None:
            walk = self.automaton.walk
            ids = canonical_tokens(
                self.vocabulary, data, key[1], lambda more: walk(behind, more) != DEAD
            )
            known = self._agreed(state, ids)
            self._plans[key] = known
            if len(self._plans) > _PLANS:
                self._plans.popitem(last=False)
        return known

    def _agreed(self, state: int, ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens up to one that the index does not take."""
        taken: list[int] = []
        for token in ids:
            after = self.index.get_next_state(state, token)
            if after is None:
                break
            state = after
            taken.append(token)
        return tuple(taken)


class _State:
    """``row``: what may come, ends included. ``final``: the text may end. ``dead``: no token may
    come but an end."""

    __slots__ = ("dead", "final", "row")

    def __init__(self, row: MaskRow, final: bool, dead: bool) -> None:
        self.row = row
        self.final = final
        self.dead = dead


class OutlinesMatcher:
    """One output's place in the index (``_state``) and in the byte automaton (``_place``).

    ``_plan``: forced tokens not yet accepted, None where they were not asked for. Whether they are
    appended at once or come one by one through narrowed masks, they are the same tokens.
    """

    __slots__ = ("_ended", "_grammar", "_history", "_place", "_plan", "_state", "_tokens")

    def __init__(self, grammar: OutlinesGrammar) -> None:
        self._grammar = grammar
        self._state = grammar.start
        self._place = 0
        self._plan: tuple[int, ...] | None = None
        self._ended = False
        self._history: list[tuple[int, int, tuple[int, ...] | None]] = []
        self._tokens: list[int] = []

    def fill(self, row: MaskRow) -> None:
        """Write what may come next over ``row``. Raises `GrammarError` where nothing may."""
        state = self._grammar.state(self._state)
        words = len(state.row)
        if row.shape[-1] < words:
            raise ValueError(f"a row of {words} words is needed, not {row.shape[-1]}")
        if self._ended or (state.dead and not state.final):
            raise GrammarError("nothing may follow the output so far")
        plan = self._forced()
        if plan:
            row[:] = 0
            row.view(np.uint8)[plan[0] >> 3] |= 1 << (plan[0] & 7)
            return
        if state.final and state.dead and not self._grammar.vocabulary.eos_ids:
            raise GrammarError("the output is whole, and the model has no token to end it")
        row[:words] = state.row
        row[words:] = 0

    def accept(self, token: int) -> bool:
        """Go on by a token. False, and nothing changed, for one that may not come."""
        grammar = self._grammar
        vocabulary = grammar.vocabulary
        if self._ended or not 0 <= token < vocabulary.size:
            return False
        if token in vocabulary.eos_ids:
            if not grammar.state(self._state).final:
                return False
            self._push(token)
            self._ended = True
            return True
        after = grammar.index.get_next_state(self._state, token)
        if after is None:
            return False
        plan = self._plan
        self._push(token)
        self._state = after
        if self._place != DEAD:
            self._place = grammar.automaton.walk(self._place, vocabulary.tokens[token])
        self._plan = plan[1:] or None if plan and plan[0] == token else None
        return True

    def rollback(self, n: int) -> None:
        """Undo the last ``n`` accepted tokens. ValueError if there were fewer."""
        if not 0 <= n <= len(self._history):
            raise ValueError(f"cannot undo {n} of {len(self._history)} tokens")
        if n:
            self._state, self._place, self._plan = self._history[-n]
            del self._history[-n:]
            del self._tokens[-n:]
            self._ended = False

    def can_end(self) -> bool:
        """Whether the output so far is whole."""
        return self._ended or self._grammar.state(self._state).final

    def is_done(self) -> bool:
        """Whether nothing more can come."""
        if self._ended:
            return True
        state = self._grammar.state(self._state)
        return state.final and state.dead

    def forced_tokens(self, recent: Sequence[int]) -> list[int]:
        """The tokens that must come next. Only this output's own tokens are context, not
        ``recent``, so that masks, which know no others, force the same."""
        del recent
        return list(self._forced())

    def fork(self) -> OutlinesMatcher:
        """A matcher in the same state that goes its own way."""
        other = OutlinesMatcher(self._grammar)
        other._state, other._place, other._plan = self._state, self._place, self._plan
        other._ended = self._ended
        other._history = self._history.copy()
        other._tokens = self._tokens.copy()
        return other

    def _forced(self) -> tuple[int, ...]:
        if self._ended:
            return ()
        if self._plan is None:
            self._plan = self._grammar.plan(self._state, self._place, self._tokens[-_CONTEXT:])
        return self._plan

    def _push(self, token: int) -> None:
        self._history.append((self._state, self._place, self._plan))
        self._tokens.append(token)


def _marker(tree: Tree, vocabulary: Vocabulary) -> str:
    """What goes before the pattern: a character that is nowhere in the language.

    The library also builds the automaton that begins anew at every marker. If the language holds
    markers, its states are sets of beginnings, and there are exponentially many of them. Where
    every character is taken by the language, a long marker keeps the beginnings apart.
    """
    single = [chr(i) for i in range(128) if bytes((i,)) in vocabulary.ids_of_bytes]
    taken = alphabet(tree)
    for char in single:
        if not contains(taken, ord(char)):
            return char
    if len(single) < _LONG_MARKER:
        raise Refused("the vocabulary has too few tokens of a single byte")
    return "".join(single[-_LONG_MARKER:])


_forms: WeakKeyDictionary[Vocabulary, outlines_core.Vocabulary] = WeakKeyDictionary()


def _library_form(vocabulary: Vocabulary) -> outlines_core.Vocabulary:
    """outlines-core's own, made once. Its single end token is an id that no model has: ends are
    ours to allow."""
    known = _forms.get(vocabulary)
    if known is None:
        ids: dict[bytes, list[int]] = {}
        for token, data in enumerate(vocabulary.tokens):
            if data:
                ids.setdefault(data, []).append(token)
        known = _forms[vocabulary] = outlines_core.Vocabulary(vocabulary.size, ids)
    return known
