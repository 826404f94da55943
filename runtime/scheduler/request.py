"""One request as the engine knows it: token ids, parameters, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..memory.radix_node import Node
from ..protocol.errors import BadInputError
from ..protocol.messages import Divergence, EngineSampling
from .batch import IntArray
from .trie import TokenTrie


@dataclass(slots=True, eq=False)
class Request:
    """A request, waiting or running. While it runs, its row in `Rows` is the record of progress."""

    rid: int
    connection: bytes
    sampling: EngineSampling
    tokens: IntArray
    """Prompt, then the output known so far, or the nodes of ``trie``. Written only while
    waiting."""
    prompt_len: int
    namespace: bytes = b""
    program: int = 0
    remaining: int = 0
    """Requests of its program that were known, but not sent, when this one was sent."""
    keep: int | None = None
    marks: tuple[int, ...] = ()
    """Handles of prefixes of the prompt that its program may read again."""
    trie: TokenTrie | None = None
    """Continuations of the prompt to be scored; its inner nodes are the tokens after the prompt."""
    priority: int = 0
    """Lower goes first; beside that of its class."""
    cls: str = ""
    """The name of its priority class; empty: the usual one."""
    level: int = 0
    """Its priority and its class's together."""
    arrival: float = 0.0
    brought_in: float = 0.0
    """When it stood aside no longer; 0: it never did, or still does."""
    admitted: float = 0.0
    """When it first left the queue, on the monotonic clock; 0: it has not yet."""
    first_token: float = 0.0
    """When it first sampled; 0: it has not yet. While it runs, its row knows."""
    row: int = -1
    node: Node | None = None
    """The tree node it holds while it runs."""
    wish: Node | None = None
    """The one it wishes to stay while it waits."""
    near: Node | None = None
    """The last that was found to lead to its tokens, from which on more is looked for."""
    cached_tokens: int = -1
    """Of its prompt, found in the tree at first admission."""
    forced_tokens: int = 0
    """Of its output, appended without being sampled."""
    heal_left: int = 0
    """Bytes at the beginning of its output that are the prompt's, and still to come."""
    retractions: int = 0
    prompt_logprobs_sent: int = 0
    """Prompt positions below this one have had their log-probs sent (after a retraction)."""
    overlaps: dict[int, int] = field(default_factory=dict[int, int])
    """Common prefix with other requests by their `serial`: they never change."""
    serial: int = 0
    chain: list[bytes] = field(default_factory=list[bytes])
    """Names of its first blocks of tokens, as far as somebody asked."""
    sought: bool = False
    """Whether it was looked for in the tiers below the tree, ..."""
    read_ahead: bool = False
    fetched_to: int = 0
    loaded_to: int = 0
    """... and how far it was read from disk and loaded from host memory."""
    then: Request | None = None
    """What goes on where this one ends. Until then its ``tokens`` are those that come between."""
    took_over: bool = False
    """Whether it goes on in the row of the one before."""
    explain: bool = False
    divergence: Divergence | None = None
    """Where its prompt left what was cached when it was admitted; only if asked for."""

    @property
    def output(self) -> IntArray:
        """Output tokens known so far (of a waiting request)."""
        return self.tokens[self.prompt_len if self.trie is None else len(self.tokens) :]

    @property
    def given(self) -> int:
        """How many tokens it came with: its prompt's, and those of a trie that are computed."""
        return self.prompt_len if self.trie is None else self.prompt_len + len(self.trie.nodes)

    @property
    def line(self) -> int:
        """How many leading tokens each follow the one before: all, but for the nodes of a trie."""
        return len(self.tokens) if self.trie is None else self.prompt_len

    @property
    def target(self) -> int:
        """How many tokens to compute before the first sample. A request that only scores never
        needs the last token's logits, nor its KV."""
        if self.sampling.max_new_tokens == 0 and self.wants_prompt_logprobs:
            return max(len(self.tokens) - 1, 1)
        return len(self.tokens)

    @property
    def wants_prompt_logprobs(self) -> bool:
        return 0 <= self.sampling.logprob_start < self.prompt_len

    @property
    def reusable(self) -> int:
        """How many leading tokens may come from the cache: at least one must be computed, and so
        must every position whose logits are asked for."""
        if self.trie is not None:
            return max(self.prompt_len - 1, 0)
        cap = self.target - 1
        if self.wants_prompt_logprobs and self.prompt_logprobs_sent < self.prompt_len:
            first = max(self.sampling.logprob_start, self.prompt_logprobs_sent)
            cap = min(cap, max(first - 1, 0))
        return cap


def follow(request: Request, kept: int, then: Request) -> None:
    """Another request goes on behind the first ``kept`` tokens of this one, which has ended."""
    then.tokens = np.concatenate((request.tokens[:kept], then.tokens))
    then.prompt_len = len(then.tokens)
    near = request.near
    while near is not None and near.depth() > kept:  # found with output that does not stay
        near = near.parent
    then.near = near


def make_tokens(ids: bytes) -> IntArray:
    """Token ids from a message. Raises `BadInputError` for bytes that are not whole int32."""
    if len(ids) % 4:
        raise BadInputError(f"{len(ids)} bytes are not whole int32 token ids", param="ids")
    return np.frombuffer(ids, dtype="<i4").astype(np.int32)
