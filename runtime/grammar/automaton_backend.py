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
MAX_SIZE = 2 * MAX_STATES
"""Characters of all choices: those that begin alike share states."""
_WIDE = 1_000
"""Tokens that may come from which on a row is made in the worker, not while others wait, ..."""
_MOST_WIDE = 400
"""... and how many such rows there may be: some milliseconds each."""
_TOGETHER = 256
"""States whose rows are made before it is seen how many are wide."""


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
        tree = reachable_tree(spec, vocabulary)
        if tree.size > MAX_SIZE:
            raise Refused(f"over {MAX_SIZE:,} characters written out")
        try:
            automaton = build(tree, MAX_STATES)
        except TooLarge as error:
            raise Refused(str(error)) from None
        except RecursionError:
            raise Refused("it is nested too deep for an automaton") from None
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
    """`PackedRows.names` and its rows. Raises `Refused`."""
    blocks = alike(automaton, levels.horizon(automaton))
    _, firsts = np.unique(blocks, return_index=True)
    states, rows = _wide_rows(automaton, levels, np.sort(firsts), vocabulary.words)
    rows, which = np.unique(rows, axis=0, return_inverse=True)
    names = np.arange(len(rows), len(rows) + len(firsts), dtype=np.int32)
    names[blocks[states]] = which.reshape(-1)
    return names[blocks], rows


def _wide_rows(
    automaton: ByteAutomaton, levels: TokenLevels, states: np.ndarray, words: int
) -> tuple[np.ndarray, np.ndarray]:
    """Those of ``states`` in which many tokens may come, and their rows. Raises `Refused`."""
    most = min(_MOST_WIDE, MAX_ROW_BYTES // (words * 4))
    candidates = states[levels.begun(automaton)[states] >= _WIDE]
    found: list[tuple[np.ndarray, np.ndarray]] = [(states[:0], np.zeros((0, words), np.int32))]
    count = 0
    for some in np.split(candidates, range(_TOGETHER, len(candidates), _TOGETHER)):
        rows = levels.rows(automaton, some)
        wide = np.unpackbits(rows.view(np.uint8), axis=1).sum(axis=1) >= _WIDE
        found.append((some[wide], rows[wide]))
        count += int(wide.sum())
        if count > most:
            raise Refused(f"over {most} states tell many tokens apart, each in its own way")
    return np.concatenate([one for one, _ in found]), np.concatenate([row for _, row in found])
