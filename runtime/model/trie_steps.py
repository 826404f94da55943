"""Items of a step that are trees: where their tokens stand, who sees whom, what is scored."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..scheduler.batch import FloatArray, IntArray, LongArray, StepBatch, TrieChunk


def text_positions(batch: StepBatch, places: IntArray) -> IntArray:
    """[T] where each token stands in its text; ``places`` [T] is where it lies in its row. The two
    differ for nodes of a tree."""
    if not any(len(trie.ends) for trie in batch.tries):
        return places
    positions = places.copy()
    begins = np.cumsum(batch.q_lens) - batch.q_lens
    for trie in batch.tries:
        begin = int(begins[trie.item])
        mine = slice(begin, begin + int(batch.q_lens[trie.item]))
        nodes = places[mine] - trie.start
        some = nodes >= 0
        positions[mine][some] = trie.start + trie.depths[nodes[some]]
    return positions


def ancestry_fields(batch: StepBatch) -> list[IntArray] | None:
    """The fields of `Ancestry`, in its order; ``None`` where no item has nodes yet."""
    trees = [trie for trie in batch.tries if len(trie.ends)]
    if not trees:
        return None
    starts, offsets = batch.kv_lens.astype(np.int32), np.zeros(len(batch.rows), np.int32)
    offset = 0
    for trie in trees:
        starts[trie.item], offsets[trie.item] = trie.start, offset
        offset += len(trie.ends)
    ends = np.concatenate([trie.ends for trie in trees])
    return [starts, offsets, ends, np.concatenate([trie.depths for trie in trees])]


def scored_rows(batch: StepBatch) -> tuple[IntArray, IntArray, IntArray]:
    """Of all tries together: which of the step's tokens have their logits looked at [H]; and for
    each target which of those [S], and its token [S]."""
    begins = np.cumsum(batch.q_lens) - batch.q_lens
    heads = [trie.heads + int(begins[trie.item]) for trie in batch.tries]
    before = np.cumsum([0, *map(len, heads)])
    of = [trie.of + int(n) for trie, n in zip(batch.tries, before)]
    targets = [trie.targets for trie in batch.tries]
    joined = (np.concatenate(parts).astype(np.int32) for parts in (heads, of, targets))
    return next(joined), next(joined), next(joined)


def target_logprobs(
    logits: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    rows: torch.Tensor,
    of: torch.Tensor,
    targets: torch.Tensor,
    of_host: IntArray,
    chunk: int,
) -> list[torch.Tensor]:
    """Log-probs of ``targets`` [S] under the logits of ``rows[of]``, in pieces that join to [S]
    float32. ``rows`` [H] picks hidden states [T, H]; of these ``chunk`` at a time have logits.
    ``of`` is ascending, and its copy on the host says where pieces end without waiting."""
    found: list[torch.Tensor] = []
    for first in range(0, len(rows), chunk):
        some = logits(hidden.index_select(0, rows[first : first + chunk]))
        low, high = np.searchsorted(of_host, (first, first + chunk)).tolist()
        mine = (of[low:high] - first).long()
        picked = some[mine, targets[low:high].long()]
        found.append(picked - some.logsumexp(dim=-1).index_select(0, mine))
    return found


def split_tries(tries: list[TrieChunk], values: FloatArray) -> list[FloatArray]:
    """The values of all, trie by trie."""
    cuts: LongArray = np.cumsum([len(trie.targets) for trie in tries])[:-1]
    return np.split(values, cuts)
