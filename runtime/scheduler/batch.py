"""One step's work, as the scheduler hands it to the model runner: plain numpy, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..protocol.messages import EngineSampling
from .tree_plan import TreePlan

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float32]

FROM_DEVICE = -1
"""In `StepBatch.ids`: feed the token that this row sampled last, which the host may not know
yet."""


@dataclass(slots=True)
class NewRow:
    """A request that takes a row of the runner's tables. Comes in the batch of its first step."""

    row: int
    sampling: EngineSampling
    prompt: IntArray
    """Prompt token ids, for penalties that count them."""
    output: IntArray
    """Tokens sampled before a retraction, oldest first; usually empty."""
    slots: IntArray
    """KV slots of the tokens already cached, position by position."""
    goes_on: bool = False
    """The row's table stays as it is: the request goes on where the one before it ended. Its slots
    are not said again then."""


@dataclass(slots=True)
class TrieChunk:
    """An item whose last tokens are inner nodes of a tree, depth first: each stands one position
    after its parent and sees its ancestors alone. What follows them is scored."""

    item: int
    start: int
    """How many of the item's tokens come before the nodes. ``kv_lens`` of the item less this is the
    number of nodes so far, n; negative or 0: none."""
    ends: IntArray
    """[n] node j and its descendants are nodes [j, ends[j])"""
    depths: IntArray
    """[n] node j stands at position start + depths[j]"""
    heads: IntArray
    """[H] which of the tokens that the item computes in this step have their logits looked at"""
    of: IntArray
    """[S] for each target, which of ``heads``; ascending"""
    targets: IntArray
    """[S] token ids whose log-probs are asked for"""


@dataclass(slots=True)
class StepBatch:
    """B items (requests), T tokens. Item i computes positions [kv_lens[i] - q_lens[i], kv_lens[i]).

    Items with ``q_lens == 1`` that only decode come first. Every array is owned by the batch.
    """

    rows: IntArray
    """[B] row of each item in the runner's request tables."""
    q_lens: IntArray
    """[B] tokens computed in this step."""
    kv_lens: IntArray
    """[B] tokens whose KV exists after this step."""
    ids: IntArray
    """[T] token ids, item after item; `FROM_DEVICE` takes the row's last sample."""
    slots: IntArray
    """[T] where each token's K and V go."""
    samples: IntArray
    """[S] indices of the items that sample a token from their last position."""
    steps: IntArray
    """[S] how many tokens each sampling row has sampled before: with its seed, fixes its draw."""
    new_rows: list[NewRow] = field(default_factory=list[NewRow])
    moves: list[tuple[int, IntArray]] = field(default_factory=list[tuple[int, IntArray]])
    """(row, slots): the row's leading positions lie in these slots from this step's attention on,
    also where `slots` names another (scratch) to write to. Entered in the table after everything
    else."""
    prompt_logprobs: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    """(item, first, last): give the log-probs of prompt tokens at positions [first, last), each
    from the logits one position before; all those logits are computed in this step."""
    targets: list[IntArray] = field(default_factory=list[IntArray])
    """The token ids at those positions, one array an entry of `prompt_logprobs`."""
    tries: list[TrieChunk] = field(default_factory=list[TrieChunk])
    """Of items that are trees; none of them decodes or samples."""
    want_logprobs: bool = False
    """Whether any sampling row wants the log-prob of its token."""
    top_logprobs: int = 0
    """The largest number of top log-probs that any row wants."""
    num_decodes: int = 0
    """How many leading items decode (q_len 1, input `FROM_DEVICE` or known)."""
    tree: TreePlan | None = None
    """What the items of a step that only decodes share, where reading it once pays."""
    masked: LongArray = field(default_factory=lambda: np.empty(0, np.int64))
    """[M] positions in `samples` that may sample some tokens only. Where there are any, launching
    computes logits; the step samples when its ticket is given the masks."""

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


@dataclass(slots=True)
class PositionLogprobs:
    """Log-probs of prompt tokens of one item: [n] float32, and the top-k beside them when
    wanted."""

    values: FloatArray
    top_ids: IntArray | None = None
    """[n, k]"""
    top_values: FloatArray | None = None
    """[n, k]"""


@dataclass(slots=True)
class StepResult:
    """What a step sampled, row for row with `StepBatch.samples`."""

    tokens: IntArray
    """[S]"""
    bad: npt.NDArray[np.bool_]
    """[S] rows whose logits held a NaN: their token means nothing."""
    logprobs: FloatArray | None = None
    """[S] of the raw logits, when any row wanted them."""
    top_ids: IntArray | None = None
    """[S, k]"""
    top_values: FloatArray | None = None
    """[S, k]"""
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list[PositionLogprobs])
    """One for each entry of `StepBatch.prompt_logprobs`."""
    tries: list[FloatArray] = field(default_factory=list[FloatArray])
    """[S] log-probs of the targets of each entry of `StepBatch.tries`."""
