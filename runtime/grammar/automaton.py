"""The automaton of a regular language over bytes: what is forced, how large, what is a match.

Built from the tree by position sets (one set of places in the pattern is one state), so every
state leads to a match. Bytes that no edge tells apart are one class. The result is interegular's
FSM, flattened to two arrays so that it can be walked fast and sent as bytes.
"""

from __future__ import annotations

from array import array

import msgspec
import numpy as np
from interegular.fsm import FSM, Alphabet

from .regex_tree import Chars, Repeat, Sequence, Tree, Union
from .utf8 import END, Trie, trie_of

MAX_STATES = 4_000
_MAX_EDGES = 400_000
"""Edges looked at while building: bounds the time (about a second)."""
_ACCEPT = -1
DEAD = -1
"""The state after a byte that cannot come."""
MOST_FORCED = 1024
"""Bytes that are told at once to be forced: each output remembers the tokens for them."""


class TooLarge(Exception):  # noqa: N818
    """The automaton is beyond what is worth building; the message says which bound it passed."""


class ByteAutomaton:
    """Deterministic, over bytes. State 0 is the start.

    ``classes``: [256] class of each byte. ``table``: int32 [states, classes], the next state or
    `DEAD`. ``finals``: bool [states]. Every state can reach a final one. Immutable.
    """

    def __init__(self, classes: bytes, table: np.ndarray, finals: np.ndarray) -> None:
        self.classes = classes
        self.finals = finals
        self._width = table.shape[1]
        self._cells = array("i", table.astype(np.int32).tobytes())
        self._cells.extend([DEAD] * self._width)
        self.padded = np.frombuffer(self._cells, np.int32).reshape(-1, self._width)
        """The table and, last, a row of nothing, which `DEAD` is the index of."""
        self.table = self.padded[:-1]
        self._final = finals.tobytes()
        self._only = array("h", self._only_bytes().tobytes())

    def _only_bytes(self) -> np.ndarray:
        """[states] int16: the one byte that may come and must; -1 where there is none."""
        live = self.table != DEAD
        members = np.bincount(np.frombuffer(self.classes, np.uint8), minlength=self._width)
        first = np.array([max(self.classes.find(key), 0) for key in range(self._width)])
        key = live.argmax(axis=1)
        forced = (live.sum(axis=1) == 1) & (members[key] == 1) & ~self.finals
        return np.where(forced, first[key], -1).astype(np.int16)

    @property
    def states(self) -> int:
        return len(self.finals)

    @property
    def nbytes(self) -> int:
        return self.padded.nbytes + 4 * self.states

    def next(self, state: int, byte: int) -> int:
        """The state after a byte; `DEAD` where it cannot come."""
        return self._cells[state * self._width + self.classes[byte]]

    def walk(self, state: int, data: bytes) -> int:
        """The state after some bytes; `DEAD` where they cannot come."""
        cells, classes, width = self._cells, self.classes, self._width
        for byte in data:
            state = cells[state * width + classes[byte]]
            if state < 0:
                return DEAD
        return state

    def is_final(self, state: int) -> bool:
        """Whether the text may end here."""
        return self._final[state] != 0

    def next_bytes(self, state: int) -> list[int]:
        """The bytes that may come."""
        row = self.table[state]
        return [byte for byte in range(256) if row[self.classes[byte]] != DEAD]

    def is_forced(self, state: int) -> bool:
        """Whether one byte must come here."""
        return self._only[state] >= 0

    def forced(self, state: int) -> tuple[bytes, int]:
        """(the bytes that must come here, the state behind them), up to a state where the text may
        end or go two ways, or `MOST_FORCED` bytes."""
        data = bytearray()
        while len(data) < MOST_FORCED and (byte := self._only[state]) >= 0:
            data.append(byte)
            state = self._cells[state * self._width + self.classes[byte]]
        return bytes(data), state

    def fsm(self) -> FSM:
        """The same automaton as interegular's, over the integers 0-255."""
        alphabet = Alphabet({byte: self.classes[byte] for byte in range(256)})  # type: ignore[arg-type]
        return FSM(
            alphabet=alphabet,
            states=set(range(self.states)),
            initial=0,
            finals=set(np.flatnonzero(self.finals).tolist()),
            map={
                s: {c: after for c, after in enumerate(row) if after != DEAD}
                for s, row in enumerate(self.table.tolist())
            },
            __no_validation__=True,
        )

    def pack(self) -> bytes:
        """As bytes, for another process."""
        form = _Packed(self.classes, self.table.tobytes(), self.finals.tobytes())
        return msgspec.msgpack.encode(form)

    @classmethod
    def unpack(cls, data: bytes) -> ByteAutomaton:
        """From `pack`'s bytes."""
        form = msgspec.msgpack.decode(data, type=_Packed)
        finals = np.frombuffer(form.finals, np.bool_)
        table = np.frombuffer(form.table, np.int32).reshape(len(finals), -1)
        return cls(form.classes, table, finals)


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    classes: bytes
    table: bytes
    finals: bytes


def build(tree: Tree, max_states: int = MAX_STATES) -> ByteAutomaton:
    """The automaton of a tree. Raises `TooLarge`."""
    return _Builder(tree, max_states).build()


class _Builder:
    """Places are nodes of a graph with empty edges; a place that reads a character has a trie
    instead. A state is a set of (trie node, place after the character), numbered."""

    def __init__(self, tree: Tree, max_states: int) -> None:
        self._max_states = max_states
        self._empty: list[tuple[int, ...]] = []
        self._reads: dict[int, tuple[Trie, int]] = {}
        self._closures: dict[int, frozenset[int]] = {_ACCEPT: frozenset((_ACCEPT,))}
        self._spots: dict[tuple[int, int, int], int] = {}
        self._edges: list[tuple[tuple[int, frozenset[int]], ...]] = []
        self._keys: list[tuple[Trie, int, int]] = []
        self._work = 0
        self._start = self._place(tree, _ACCEPT)
        self.classes, self._members = self._byte_classes()

    # --- places -----------------------------------------------------------------------------------

    def _place(self, tree: Tree, after: int) -> int:
        """The place where ``tree`` begins that goes on at ``after``."""
        if isinstance(tree, Chars):
            place = self._new(())
            self._reads[place] = (trie_of(tree.ranges), after)
            return place
        if isinstance(tree, Sequence):
            for part in reversed(tree.parts):
                after = self._place(part, after)
            return after
        if isinstance(tree, Union):
            return self._new(tuple(self._place(part, after) for part in tree.parts))
        return self._repeat(tree, after)

    def _repeat(self, tree: Repeat, after: int) -> int:
        if tree.high is None:
            loop = self._new(())
            self._empty[loop] = (self._place(tree.body, loop), after)
            after = loop
        else:
            end = after
            for _ in range(tree.high - tree.low):
                after = self._new((self._place(tree.body, after), end))
        for _ in range(tree.low):
            after = self._place(tree.body, after)
        return after

    def _new(self, empty: tuple[int, ...]) -> int:
        self._count(1)
        self._empty.append(empty)
        return len(self._empty) - 1

    def _count(self, work: int) -> None:
        self._work += work
        if self._work > _MAX_EDGES:
            raise TooLarge("the automaton takes too long to build")

    def _closure(self, place: int) -> frozenset[int]:
        """Spots that are reached from a place without a byte."""
        known = self._closures.get(place)
        if known is not None:
            return known
        spots: set[int] = set()
        seen, todo = {place}, [place]
        while todo:
            at = todo.pop()
            self._count(1)
            if at == _ACCEPT:
                spots.add(_ACCEPT)
                continue
            if at in self._reads:
                trie, after = self._reads[at]
                spots.add(self._spot(trie, 0, after))
            for other in self._empty[at]:
                if other not in seen:
                    seen.add(other)
                    todo.append(other)
        self._closures[place] = frozenset(spots)
        return self._closures[place]

    def _spot(self, trie: Trie, node: int, after: int) -> int:
        key = (id(trie), node, after)
        spot = self._spots.get(key)
        if spot is None:
            spot = self._spots[key] = len(self._keys)
            self._keys.append((trie, node, after))
            self._edges.append(())
        return spot

    def _edges_of(self, spot: int) -> tuple[tuple[int, frozenset[int]], ...]:
        """(class of bytes, spots behind it) of a spot."""
        if not self._edges[spot]:
            trie, node, after = self._keys[spot]
            edges: list[tuple[int, frozenset[int]]] = []
            for low, high, child in trie.nodes[node]:
                behind = (
                    self._closure(after)
                    if child == END
                    else frozenset((self._spot(trie, child, after),))
                )
                edges += [(c, behind) for c in dict.fromkeys(self.classes[low : high + 1])]
            self._edges[spot] = tuple(edges)
        return self._edges[spot]

    def _byte_classes(self) -> tuple[bytes, int]:
        cuts = {0}
        for trie in {id(t): t for t, _ in self._reads.values()}.values():
            for node in trie.nodes:
                for low, high, _ in node:
                    cuts |= {low, high + 1}
        classes = bytearray()
        for byte in range(256):
            classes.append(classes[-1] + (byte in cuts) if classes else 0)
        return bytes(classes), classes[-1] + 1

    # --- states -----------------------------------------------------------------------------------

    def build(self) -> ByteAutomaton:
        start = self._closure(self._start)
        numbers = {start: 0}
        states = [start]
        rows: list[list[int]] = []
        for state in states:  # grows while it is walked
            moves: dict[int, frozenset[int]] = {}
            for spot in state:
                if spot == _ACCEPT:
                    continue
                edges = self._edges_of(spot)
                self._count(len(edges))
                for key, behind in edges:
                    known = moves.get(key)
                    moves[key] = behind if known is None else known | behind
            row = [DEAD] * self._members
            for key, behind in moves.items():
                number = numbers.get(behind)
                if number is None:
                    if len(states) >= self._max_states:
                        raise TooLarge(f"the automaton has over {self._max_states:,} states")
                    number = numbers[behind] = len(states)
                    states.append(behind)
                row[key] = number
            rows.append(row)
        finals = np.array([_ACCEPT in state for state in states], np.bool_)
        return ByteAutomaton(self.classes, np.array(rows, np.int32), finals)
