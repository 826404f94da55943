"""From a `Submit` to a `Request`, or the reason why there is none.

What is wrong with one request must not reach a step, where it would be everybody's failure.
"""

from __future__ import annotations

import numpy as np

from ..protocol.errors import BadInputError
from ..protocol.messages import EngineSampling, Submit
from ..scheduler.batch import IntArray
from ..scheduler.request import Request, make_tokens
from ..scheduler.trie import trie_of
from .handles import Handles

MAX_STOP_IDS = 1024
"""The request with the most sets how many every row is compared with, at every step."""
MAX_MARKS = 256
MAX_HEAL_BYTES = 4096
MAX_FOLLOWERS = 64
_INT32, _INT64 = 2**31, 2**63


def request_of(
    message: Submit, connection: bytes, handles: Handles, vocab_size: int
) -> Request | None:
    """The request that a message asks for; ``None`` when it builds on tokens that are not there.

    Raises `BadInputError` for what no step could compute.
    """
    _check_numbers(message)
    check_sampling(message.sampling, vocab_size)
    then = None if message.then is None else _then(message.then, message, connection, vocab_size)
    tokens: IntArray | None = make_tokens(message.ids)
    base = () if message.base is None else (message.base,)
    near = None
    if message.base is not None:
        near = handles.near(message.base, message.base_len, message.namespace)
        tokens = handles.extend(message.base, message.base_len, tokens)
        if tokens is None:
            return None
    if len(tokens) and tokens.view(np.uint32).max() >= vocab_size:  # a negative one is a large one
        raise BadInputError(f"token ids must be in [0, {vocab_size})", param="ids")
    if len(message.marks) > MAX_MARKS:
        raise BadInputError(f"{len(message.marks)} marks; at most {MAX_MARKS}", param="marks")
    for _, length in message.marks:
        if not 0 <= length <= len(tokens):
            raise BadInputError(
                f"a mark at {length} in a prompt of {len(tokens)} tokens", param="marks"
            )
    prompt_len = len(tokens)
    trie = None
    if message.trie is not None:
        asked = message.sampling
        if asked.max_new_tokens or asked.logprob_start >= 0 or asked.constraint is not None:
            raise BadInputError("a request with a trie generates and scores nothing else",
                                param="trie")  # fmt: skip
        trie = trie_of(message.trie, vocab_size)
        tokens = np.concatenate((tokens, trie.nodes))
    return Request(
        rid=message.rid,
        connection=connection,
        sampling=message.sampling,
        tokens=tokens,
        prompt_len=prompt_len,
        trie=trie,
        namespace=message.namespace,
        program=message.program,
        remaining=message.remaining,
        near=near,
        keep=message.keep,
        marks=(*(handle for handle, _ in message.marks), *base),
        priority=message.priority,
        cls=message.cls,
        then=then,
        explain=message.explain,
        heal_left=len(message.sampling.heal),
    )


def _check_numbers(message: Submit) -> None:
    """Of a request, and of all that go on where it ends."""
    rids: set[int] = set()
    at: Submit | None = message
    while at is not None:
        if not 0 <= at.rid < _INT64 or at.rid in rids:
            raise BadInputError(
                f"request ids must be in [0, 2^63), each once, not {at.rid}", param="rid"
            )
        rids.add(at.rid)
        if len(rids) > MAX_FOLLOWERS:
            raise BadInputError(
                f"more than {MAX_FOLLOWERS} go on one after the other", param="then"
            )
        if not 0 <= at.remaining < _INT64:
            raise BadInputError(f"remaining must not be {at.remaining}", param="remaining")
        if not -_INT32 <= at.priority < _INT32:
            raise BadInputError(f"priority must not be {at.priority}", param="priority")
        at = at.then


def _then(message: Submit, before: Submit, connection: bytes, vocab_size: int) -> Request:
    """What goes on where a request ends. Raises `BadInputError`."""
    if message.base is not None or message.trie is not None or message.marks or (
        message.sampling.constraint is not None or message.sampling.heal
        or message.sampling.logprob_start >= 0
    ) or before.trie is not None or not message.sampling.max_new_tokens:  # fmt: skip
        raise BadInputError("what goes on where another ends only generates", param="then")
    tokens = make_tokens(message.ids)
    if len(tokens) and tokens.view(np.uint32).max() >= vocab_size:  # a negative one is a large one
        raise BadInputError(f"token ids must be in [0, {vocab_size})", param="ids")
    check_sampling(message.sampling, vocab_size)
    then = message.then
    return Request(
        rid=message.rid,
        connection=connection,
        sampling=message.sampling,
        tokens=tokens,
        prompt_len=0,
        namespace=before.namespace,
        program=before.program,
        remaining=message.remaining,
        keep=message.keep,
        priority=before.priority,
        cls=before.cls,
        then=None if then is None else _then(then, before, connection, vocab_size),
    )


def check_sampling(sampling: EngineSampling, vocab_size: int) -> None:
    """Raises `BadInputError` for values that the columns of a step cannot hold."""
    for name, value, low, high in (
        ("max_new_tokens", sampling.max_new_tokens, 0, _INT32),
        ("min_new_tokens", sampling.min_new_tokens, 0, _INT32),
        ("top_k", sampling.top_k, -1, _INT32),
        ("top_logprobs", sampling.top_logprobs, 0, vocab_size + 1),
        ("seed", sampling.seed, -_INT64, _INT64),
    ):
        if not low <= value < high:
            raise BadInputError(f"{name} must be in [{low}, {high}), not {value}", param=name)
    if len(sampling.stop_ids) > MAX_STOP_IDS:
        raise BadInputError(
            f"{len(sampling.stop_ids)} stop token ids; at most {MAX_STOP_IDS} are allowed",
            param="stop_ids",
        )
    for name, ids in (("stop_ids", sampling.stop_ids), ("bias_ids", sampling.bias_ids)):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise BadInputError(
                    f"{name}: token ids must be in [0, {vocab_size}), not {token}", param=name
                )
    if len(sampling.bias_ids) != len(sampling.bias_values):
        raise BadInputError("bias_ids and bias_values must be equally many", param="bias_values")
    if len(sampling.heal) > MAX_HEAL_BYTES:
        raise BadInputError(
            f"{len(sampling.heal)} bytes to write again; at most {MAX_HEAL_BYTES}", param="heal"
        )
    if sampling.heal and sampling.constraint is not None:
        try:
            sampling.heal.decode()
        except UnicodeDecodeError:
            raise BadInputError(
                "the prompt ends inside of a character, where no constraint can begin", param="heal"
            ) from None
    if not all(sampling.stops):
        raise BadInputError("a stop string must not be empty", param="stops")
