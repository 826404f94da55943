"""Regexes and choices by outlines-core's index: one packed mask row per state of its automaton.

The index matches by the first alternative that fits and drops some states, so a pattern goes in
behind a marker and before ``\\z``: that takes away early matches, and the marker lets the pattern
match the empty text. Every matcher starts behind it. What is not small (an index grows with states
times vocabulary, and cannot be stopped while it is built) is refused before.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import msgspec
import outlines_core

from ..protocol.errors import GrammarError
from .automaton import TooLarge, build
from .backend import Refused
from .charset import contains
from .checks_regex import language_of
from .index_size import expected_ways
from .outlines_grammar import OutlinesGrammar, PackedIndex, allowed_ids, packed_row
from .reachable import reachable_tree
from .regex_tree import Tree, alphabet, literal, portable
from .spec import Spec
from .state_matcher import MAX_ROW_BYTES
from .vocabulary import Vocabulary

MAX_INDEX_BYTES = 8 << 20
MAX_SIZE = 2_000
"""Characters of a pattern with its repeats written out."""
MAX_STATES = 2_000
MAX_STATES_TIMES_TOKENS = 100_000_000
"""An index takes some 10 ns for each token in each state: a second."""
_BYTES_OF_A_WAY = 6
"""Of an index, for each token that may come in each state."""
_LONG_MARKER = 16
_WIDE = 1_000
"""Tokens that may come from which on a row is made in the worker."""


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
        if expected_ways(automaton, vocabulary) * _BYTES_OF_A_WAY > MAX_INDEX_BYTES:
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
        start = _behind(index, marker.encode(), vocabulary)
        rows = _wide_rows(index, start, vocabulary)
        return msgspec.msgpack.encode(PackedIndex(data, automaton.pack(), start, rows))

    def finish(self, spec: Spec, vocabulary: Vocabulary, data: bytes) -> OutlinesGrammar:
        """The grammar from `try_in_worker`'s bytes. Raises `GrammarError`."""
        del spec
        form = msgspec.msgpack.decode(data, type=PackedIndex)
        index = outlines_core.Index.from_binary(form.index)
        return OutlinesGrammar(index, vocabulary, form)

    def compile(self, spec: Spec, vocabulary: Vocabulary) -> OutlinesGrammar:
        """Both halves here, with no deadline: for tests and trusted specs."""
        return self.finish(spec, vocabulary, self.try_in_worker(spec, vocabulary))


def _behind(index: outlines_core.Index, marker: bytes, vocabulary: Vocabulary) -> int:
    """The state of the index behind the marker."""
    state: int | None = index.get_initial_state()
    for byte in marker:
        token = vocabulary.ids_of_bytes[bytes((byte,))]
        state = None if state is None else index.get_next_state(state, token)
    if state is None:
        raise GrammarError("outlines-core's index does not begin as its pattern does")
    return state


def _wide_rows(index: outlines_core.Index, start: int, vocabulary: Vocabulary) -> dict[int, bytes]:
    """Rows that would take long to make while others wait, of the states that single bytes lead to
    (all, but where the vocabulary lacks a byte)."""
    single = [i for data, i in vocabulary.ids_of_bytes.items() if len(data) == 1]
    seen, todo = {start}, [start]
    rows: dict[int, bytes] = {}
    while todo and len(rows) * vocabulary.words * 4 < MAX_ROW_BYTES:
        state = todo.pop()
        ids = allowed_ids(index, state, vocabulary)
        if ids.size >= _WIDE:
            rows[state] = packed_row(ids, index.is_final_state(state), vocabulary).tobytes()
        for token in single:
            after = index.get_next_state(state, token)
            if after is not None and after not in seen:
                seen.add(after)
                todo.append(after)
    return rows


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
