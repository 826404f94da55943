"""What the tree attention kernels do in a step, as lists of equal pieces of work: plain numpy.

Keys that several items read are a segment; what an item reads alone is its tail::

    item 0   [ segment 0 .......... ][ segment 1 ... ][ tail ]
    item 1   [                      ][               ][ tail ]
    item 2   [                      ][ tail ............... ]

Segments are cut into pieces of keys and their readers' queries into blocks of rows; tails too are
cut into pieces, but where is found out on the device, because they grow. Each piece leaves one
partial result (a part) for each reader. The parts of an item lie side by side: those of its tail,
then those of its segments.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]

FIELDS = 8
"""int32 of an entry of `WorkList.pieces`: one sector of memory."""
SHORTEST = 128
"""Keys under which a piece of a segment is not worth its partial results."""
STARTUP = 128
"""Keys that take as long as beginning a piece and leaving its results."""
BESIDE = 2
"""Pieces that a multiprocessor runs side by side, ..."""
SLOWER = 1.2
"""... and how much longer each takes then."""
MOST_LOAD = 4
"""Pieces of segments for a multiprocessor, at most."""


@dataclass(frozen=True, slots=True)
class ListShape:
    """How a device wants its work cut, and how much of it its buffers hold."""

    kv_heads: int
    group: int
    """Query heads of one KV head."""
    block_rows: int
    """Rows (reader, head) of a piece of a segment, ..."""
    block_keys: int
    """... and keys that are taken at a time."""
    processors: int
    """Multiprocessors of the device."""
    most_items: int
    most_pieces: int
    most_readers: int
    most_parts: int

    @property
    def sizes(self) -> list[int]:
        """int32 in each array of a full list, in the order of `WorkList.arrays`."""
        return [1, self.most_pieces * FIELDS, self.most_readers * 2, self.most_items + 1]


def list_shape(
    heads: int,
    kv_heads: int,
    block_rows: int,
    block_keys: int,
    most_items: int,
    processors: int,
) -> ListShape:
    """The shape for up to ``most_items`` items on so many multiprocessors."""
    group = heads // kv_heads
    pieces = ceil_div(processors * MOST_LOAD, kv_heads)
    readers = 4 * most_items
    tails = most_items + pieces
    return ListShape(
        kv_heads=kv_heads,
        group=group,
        block_rows=block_rows,
        block_keys=block_keys,
        processors=processors,
        most_items=most_items,
        most_pieces=pieces
        + ceil_div(readers * group, block_rows)
        + ceil_div(most_items, 2)
        + tails,
        most_readers=readers,
        most_parts=tails + readers + pieces * ceil_div(block_rows, group),
    )


@dataclass(slots=True)
class WorkList:
    """The work of one layer, the same for all layers. Arrays are int32."""

    pieces: IntArray
    """[n, 8]: those of segments, then those of tails. Of a segment: table row, first key, last key
    + 1, first row of the block, rows in all (readers times group), the segment's first entry in
    `readers`, piece, 0. Row r is head r % group of reader r // group. Of a tail: table row, first
    key of the tail, pieces, piece, group, item, part, 1."""
    readers: IntArray
    """[m, 2]: the item that reads, and the part that takes the result of piece 0."""
    offsets: IntArray
    """[B + 1]: item i has the parts [offsets[i], offsets[i + 1])."""

    @property
    def shared(self) -> IntArray:
        """The pieces of segments."""
        return self.pieces[self.pieces[:, 7] == 0]

    @property
    def tails(self) -> IntArray:
        """The pieces of tails."""
        return self.pieces[self.pieces[:, 7] == 1]

    @property
    def arrays(self) -> list[IntArray]:
        count = np.array([len(self.pieces)], np.int32)
        return [count, self.pieces.ravel(), self.readers.ravel(), self.offsets]

    def padded(self, shape: ListShape) -> list[tuple[IntArray, IntArray]]:
        """The arrays, each with what fills it up to its size in ``shape``. Items beyond those
        there are have no parts."""
        pieces = []
        for array, size in zip(self.arrays, shape.sizes):
            last = array[-1] if array is self.offsets else np.int32(0)
            pieces.append((array, np.full(size - len(array), last, np.int32)))
        return pieces


def make_list(
    rows: IntArray,
    kv_lens: IntArray,
    starts: IntArray,
    ends: IntArray,
    reader_starts: IntArray,
    readers: IntArray,
    tails: IntArray,
    shape: ListShape,
) -> WorkList | None:
    """Cut the work of B items.

    ``rows`` and ``kv_lens`` [B]: table row and length, which may grow later. Segment s [S] holds
    the positions [starts[s], ends[s]) and is read by the items readers[reader_starts[s] :
    reader_starts[s + 1]], of which each has these slots in its table row. ``tails`` [B]: where the
    keys begin that an item reads alone. Returns ``None`` if it is more than the shape holds.
    """
    items, group, keys = len(rows), shape.group, shape.block_keys
    count = np.diff(reader_starts)
    lengths = ends - starts
    blocks = -(-count * group // shape.block_rows)
    own = np.maximum(kv_lens - tails, 1)
    weights = np.append(blocks, np.full(items, ceil_div(group, shape.block_rows)))
    size = _piece(lengths, own, weights * shape.kv_heads, shape.processors, keys)
    pieces = -(-lengths // size)
    # Equal pieces, each a whole number of tiles.
    each = -(-lengths // (np.maximum(pieces, 1) * keys)) * keys
    pieces = -(-lengths // each)

    own_pieces = -(-own // size)

    segment = np.repeat(np.arange(len(count)), count)
    of_reader = pieces[segment]
    parts = own_pieces + np.bincount(readers, of_reader, minlength=items).astype(np.int64)
    offsets = np.zeros(items + 1, np.int64)
    np.cumsum(parts, out=offsets[1:])
    total, in_tails = int((pieces * blocks).sum()), int(own_pieces.sum())
    if (
        items > shape.most_items
        or total + in_tails > shape.most_pieces
        or len(readers) > shape.most_readers
        or offsets[-1] > shape.most_parts
    ):
        return None

    # The parts of an item's segments follow those of its tail, in the order of segments.
    order = np.argsort(readers, kind="stable")
    before = np.cumsum(of_reader[order]) - of_reader[order]
    reads = np.bincount(readers, minlength=items)
    first = np.repeat((np.cumsum(reads) - reads)[reads > 0], reads[reads > 0])
    entries = np.empty((len(readers), 2), np.int32)
    entries[:, 0] = readers
    entries[order, 1] = (offsets[:-1] + own_pieces)[readers[order]] + before - before[first]

    # Blocks of one piece stand together: they read the same keys at the same time.
    which, within = _spread(pieces * blocks)
    piece, block = within // blocks[which], within % blocks[which]
    begin = starts[which] + piece * each[which]
    shared = np.zeros((total, FIELDS), np.int32)
    shared[:, 0] = rows[readers[reader_starts[:-1]]][which]
    shared[:, 1] = begin
    shared[:, 2] = np.minimum(begin + each[which], ends[which])
    shared[:, 3] = block * shape.block_rows
    shared[:, 4] = (count * group)[which]
    shared[:, 5] = reader_starts[which]
    shared[:, 6] = piece

    item, piece = _spread(own_pieces)
    lone = np.zeros((in_tails, FIELDS), np.int32)
    lone[:, 0] = rows[item]
    lone[:, 1] = tails[item]
    lone[:, 2] = own_pieces[item]
    lone[:, 3] = piece
    lone[:, 4] = group
    lone[:, 5] = item
    lone[:, 6] = offsets[item] + piece
    lone[:, 7] = 1
    return WorkList(np.concatenate((shared, lone)), entries, offsets.astype(np.int32))


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _piece(
    segments: IntArray, tails: IntArray, weights: IntArray, processors: int, keys: int
) -> int:
    """Keys of a piece, a whole number of tiles: what finishes first, if a length cut into n pieces
    is n * ``weights`` programs; [S] lengths of segments, [B] of tails, [S + B] weights."""
    lengths = np.append(segments, tails)
    longest = int(lengths.max())
    # The longest in 1, 2, 3 … pieces.
    sizes = -(-longest // (np.arange(1, 65) * keys)) * keys
    sizes = np.unique(np.maximum(sizes, SHORTEST))[::-1]
    pieces = -(-lengths[:, None] // sizes)
    split = len(segments)
    of_segments = weights[:split] @ pieces[:split]
    programs = of_segments + weights[split:] @ pieces[split:]
    at_once = BESIDE * processors
    # Segments are equal and begin first; tails, mostly shorter, take the room beside and after.
    turns = np.maximum(-(-of_segments // at_once), 1) * (sizes + STARTUP)
    work = (int(lengths @ weights) + STARTUP * programs) / at_once
    time = np.maximum(turns, work) * np.where(programs > processors, SLOWER, 1.0)
    able = of_segments <= MOST_LOAD * processors
    able[0] |= not able.any()  # there is no cutting into fewer
    return int(sizes[able][time[able].argmin()])


def _spread(counts: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(0 0 0 1 1 …, 0 1 2 0 1 …): i as often as counts[i] says, and which time it is."""
    which = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    return which, within
