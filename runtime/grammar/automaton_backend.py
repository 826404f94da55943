"""Regexes, choices and grammars that are regular, by an automaton of our own over bytes.

A count of hundreds makes thousands of states, but no token is long enough to tell most of them
apart (`alike`), so their rows are few.
"""

from __future__ import annotations

import msgspec
import numpy as np

from .alike import alike
from .automaton import ByteAutomaton, TooLarge, build
from .automaton_grammar import AutomatonGrammar, PackedRows
from .backend import Refused
from .reachable import reachable_tree
from .regular import regular_tree
from .spec import Spec
from .state_matcher import MAX_ROW_BYTES
from .token_levels import TokenLevels, levels_of
from .vocabulary import Vocabulary

MAX_STATES = 50_000
_WIDE = 1_000
"""Tokens that may begin from which on a row is made in the worker, not while others wait, ..."""
_MOST_WIDE = 400
"""... and how many are: some milliseconds each."""


class AutomatonBackend:
    """Compiles ``regex``, ``choice``, and the ``ebnf`` whose rules do not lead back to themselves.
    Stateless but for trees of vocabularies' tokens."""

    name = "automaton"

    def supports(self, spec: Spec) -> str | None:
        """Why the spec is not for this backend, or None. Raises `GrammarError` for a wrong one."""
        if regular_tree(spec) is not None:
            return None
        if spec.kind == "ebnf":
            return "the automaton takes no rules that lead back to themselves, and no Lark"
        return f"the automaton takes regexes, choices and regular grammars, not a {spec.kind}"

    def try_in_worker(self, spec: Spec, vocabulary: Vocabulary) -> bytes:
        """The automaton and its wide rows as bytes. Raises `GrammarError`, and `Refused` for what
        would be too large."""
        reason = self.supports(spec)
        if reason is not None:
            raise Refused(reason)
        try:
            automaton = build(reachable_tree(spec, vocabulary), MAX_STATES)
        except TooLarge as error:
            raise Refused(str(error)) from None
        names, rows = _named_rows(automaton, levels_of(vocabulary), vocabulary)
        form = PackedRows(automaton.pack(), names.tobytes(), rows.tobytes())
        return msgspec.msgpack.encode(form)

    def finish(self, spec: Spec, vocabulary: Vocabulary, data: bytes) -> AutomatonGrammar:
        """The grammar from `try_in_worker`'s bytes. Raises `GrammarError`."""
        del spec
        form = msgspec.msgpack.decode(data, type=PackedRows)
        return AutomatonGrammar(levels_of(vocabulary), vocabulary, form)

    def compile(self, spec: Spec, vocabulary: Vocabulary) -> AutomatonGrammar:
        """Both halves here, with no deadline: for tests and trusted specs."""
        return self.finish(spec, vocabulary, self.try_in_worker(spec, vocabulary))


def _named_rows(
    automaton: ByteAutomaton, levels: TokenLevels, vocabulary: Vocabulary
) -> tuple[np.ndarray, np.ndarray]:
    """`PackedRows.names` and its rows."""
    blocks = alike(automaton, levels.horizon(automaton))
    _, firsts = np.unique(blocks, return_index=True)
    most = min(_MOST_WIDE, MAX_ROW_BYTES // (vocabulary.words * 4))
    wide = np.sort(firsts[levels.begun(automaton)[firsts] >= _WIDE])[:most]
    rows, which = np.unique(levels.rows(automaton, wide), axis=0, return_inverse=True)
    names = np.arange(len(rows), len(rows) + len(firsts), dtype=np.int32)
    names[blocks[wide]] = which.reshape(-1)
    return names[blocks], rows
