"""What the tree attention kernels do in a step, as lists of equal pieces of work: plain numpy.

Keys that several items read are a segment; what an item reads alone is its tail::

    item 0   [ segment 0 .......... ][ segment 1 ... ][ tail ]
    item 1   [                      ][               ][ tail ]
    item 2   [                      ][ tail ............... ]

Segments are cut into pieces of keys and their readers' queries into blocks of rows; tails are cut
into pieces on the device, because they grow. Each piece leaves one partial result (a part) for each
reader. The parts of an item lie side by side: those of its tail, then those of its segments.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]

FIELDS = 8
"""int32 of an entry of `WorkList.shared` and of `WorkList.tails`: one sector of memory."""
SHORTEST = 128
"""Keys under which a piece of a segment is not worth its partial results."""
SHORTEST_TAIL = 64
STARTUP = 128
"""Keys that take as long as beginning a piece of a segment and leaving its results."""
LOADS = np.array([0.0, 1.0, 1.2, 2.2, 2.4])
"""How long a multiprocessor takes for so many pieces of segments: two run side by side."""
MOST_LOAD = len(LOADS) - 1


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
    tail_units: int
    """Pieces of tails, times KV heads, that the device runs at once."""
    most_items: int
    most_shared: int
    most_readers: int
    most_tails: int
    most_parts: int

    @property
    def sizes(self) -> list[int]:
        """int32 in each array of a full list, in the order of `WorkList.arrays`."""
        return [
            2,
            self.most_shared * FIELDS,
            self.most_readers * 2,
            self.most_tails * FIELDS,
            self.most_items + 1,
        ]


def list_shape(
    heads: int,
    kv_heads: int,
    block_rows: int,
    block_keys: int,
    most_items: int,
    processors: int,
    tail_programs: int,
) -> ListShape:
    """The shape for up to ``most_items`` items on so many multiprocessors, each of which runs so
    many programs of tails at once."""
    group = heads // kv_heads
    tail_units = processors * tail_programs
    pieces = ceil_div(processors * MOST_LOAD, kv_heads)
    readers = 4 * most_items
    tails = most_items + ceil_div(tail_units, kv_heads)
    return ListShape(
        kv_heads=kv_heads,
        group=group,
        block_rows=block_rows,
        block_keys=block_keys,
        processors=processors,
        tail_units=tail_units,
        most_items=most_items,
        most_shared=pieces + ceil_div(readers * group, block_rows) + ceil_div(most_items, 2),
        most_readers=readers,
        most_tails=tails,
        most_parts=tails + readers + pieces * ceil_div(block_rows, group),
    )


@dataclass(slots=True)
class WorkList:
    """The work of one layer, the same for all layers. Arrays are int32."""

    counts: IntArray
    """[2]: how many entries `shared` and `tails` have."""
    shared: IntArray
    """[n, 8]: table row, first key, last key + 1, first row of the block, rows in all (readers
    times group), the segment's first entry in `readers`, piece, 0. Row r is head r % group of
    reader r // group."""
    readers: IntArray
    """[m, 2]: the item that reads, and the part that takes the result of piece 0."""
    tails: IntArray
    """[t, 8]: table row, item, first key of the tail, piece, pieces, part, 0, 0."""
    offsets: IntArray
    """[B + 1]: item i has the parts [offsets[i], offsets[i + 1])."""

    @property
    def arrays(self) -> list[IntArray]:
        return [
            self.counts, self.shared.ravel(), self.readers.ravel(), self.tails.ravel(),
            self.offsets,
        ]  # fmt: skip

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
    size = _piece(lengths, blocks * shape.kv_heads, shape.processors, keys)
    pieces = -(-lengths // size)
    # Equal pieces, each a whole number of tiles.
    each = -(-lengths // (np.maximum(pieces, 1) * keys)) * keys
    pieces = -(-lengths // each)

    own = np.maximum(kv_lens - tails, 1)
    row_blocks = ceil_div(group, 16) * shape.kv_heads
    size = _tail_piece(own, row_blocks, shape.tail_units, keys)
    own_pieces = -(-own // size)

    segment = np.repeat(np.arange(len(count)), count)
    of_reader = pieces[segment]
    parts = own_pieces + np.bincount(readers, of_reader, minlength=items).astype(np.int64)
    offsets = np.zeros(items + 1, np.int64)
    np.cumsum(parts, out=offsets[1:])
    total, in_tails = int((pieces * blocks).sum()), int(own_pieces.sum())
    if (
        items > shape.most_items
        or total > shape.most_shared
        or len(readers) > shape.most_readers
        or in_tails > shape.most_tails
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
    lone[:, 1] = item
    lone[:, 2] = tails[item]
    lone[:, 3] = piece
    lone[:, 4] = own_pieces[item]
    lone[:, 5] = offsets[item] + piece
    counts = np.array([total, in_tails], np.int32)
    return WorkList(counts, shared, entries, lone, offsets.astype(np.int32))


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _piece(lengths: IntArray, weights: IntArray, processors: int, keys: int) -> int:
    """Keys of a piece of a segment, a whole number of tiles: what finishes first, if a length cut
    into n pieces is n * ``weights`` programs."""
    if not len(lengths):
        return keys
    longest = int(lengths.max())
    # The longest in 1, 2, 3 … pieces.
    sizes = -(-longest // (np.arange(1, 65) * keys)) * keys
    sizes = np.unique(np.maximum(sizes, SHORTEST))[::-1]
    units = weights @ -(-lengths[:, None] // sizes)
    load = -(-units // processors)
    load[0] = min(load[0], MOST_LOAD)  # there is no cutting into fewer
    able = load <= MOST_LOAD
    time = LOADS[load[able]] * (sizes[able] + STARTUP)
    return int(sizes[able][time.argmin()])


def _tail_piece(lengths: IntArray, weight: int, units: int, keys: int) -> int:
    """Keys of a piece of a tail: the shortest with which all pieces, each ``weight`` programs, run
    at once."""
    longest = int(lengths.max())
    size = max(SHORTEST_TAIL, ceil_div(int(lengths.sum(dtype=np.int64)) * weight, units))
    size = ceil_div(size, keys) * keys
    while size < longest and int((-(-lengths // size)).sum()) * weight > units:
        size += max(keys, size // 8 // keys * keys)
    return size


def _spread(counts: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(0 0 0 1 1 …, 0 1 2 0 1 …): i as often as counts[i] says, and which time it is."""
    which = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    return which, within
