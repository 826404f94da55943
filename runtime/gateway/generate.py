"""`Generate`: one prompt without the language."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from ..program.constraint import check_constraint
from ..protocol.errors import BadInputError
from ..protocol.messages import Generate, Generated
from ..protocol.meta import MetaInfo
from ..protocol.sampling import sampling_from
from .executor import EngineExecutor
from .generation import Generation, all_of
from .healing import TakenBack
from .request import IntArray
from .stopper import Stopper

Tell = Callable[[Generated], None]


async def generate(
    executor: EngineExecutor,
    message: Generate,
    program: int,
    tell: Tell,
    stopper: Stopper | None = None,
) -> Generated:
    """Run it, telling pieces on the way when it streams; returns the end. ``stopper`` can end it
    early.

    Raises `BadInputError`, `ContextLengthError`, and what the engine reports.
    """
    params = sampling_from(message.sampling)
    await check_constraint(params)
    prompt = prompt_ids(executor, message.prompt, message.input_ids)
    back = TakenBack(prompt)
    if params.heal and params.max_new_tokens != 0:
        back = (await executor.healer()).take_back(prompt)
    first = Generation(
        executor.engine,
        executor.tokenizer,
        params,
        back.prompt,
        back.sampling(executor.resolve(params, len(prompt))),
        namespace=executor.namespace(message.cache_salt),
        program=program,
        name=message.rid,
        stopper=stopper,
        explain=message.explain,
    )
    jobs = []
    for index in range(params.n):
        on_piece = _piece(message.rid, index, params.n, tell) if message.stream else None
        jobs.append(first.sample(index).run(on_piece))
    samples = await all_of(jobs)
    texts = [sample.text for sample in samples]
    ids = [sample.tokens[sample.healed :] for sample in samples]
    if message.stream:
        texts, ids = [""] * params.n, [[] for _ in samples]
    return Generated(
        rid=message.rid, texts=texts, output_ids=ids, metas=[sample.meta for sample in samples]
    )


def _piece(
    rid: str, index: int, count: int, tell: Tell
) -> Callable[[str, list[int], MetaInfo | None], None]:
    def on_piece(text: str, ids: list[int], meta: MetaInfo | None) -> None:
        texts = [""] * count
        texts[index] = text
        all_ids: list[list[int]] = [[] for _ in range(count)]
        all_ids[index] = ids
        metas = [MetaInfo(id=rid) for _ in range(count)]
        if meta is not None:
            metas[index] = msgspec.structs.replace(meta, id=rid)
        tell(Generated(rid=rid, texts=texts, output_ids=all_ids, metas=metas, done=False))

    return on_piece


def prompt_ids(
    executor: EngineExecutor, prompt: str | None, input_ids: list[int] | bytes | None
) -> IntArray:
    """Ids of a text, its special tokens parsed, or ids as they are. Raises `BadInputError`."""
    if (prompt is None) == (input_ids is None):
        raise BadInputError("give either prompt or input_ids", param="prompt")
    tokenizer = executor.tokenizer
    if prompt is not None:
        ids = tokenizer.encode(prompt, special=True, start=True)
        if not ids and tokenizer.bos_id is not None:
            ids = [tokenizer.bos_id]
        return np.asarray(ids, np.int32)
    ids = input_ids or []
    if not ids:
        raise BadInputError("input_ids is empty", param="input_ids")
    if isinstance(ids, bytes):
        if len(ids) % 4:
            raise BadInputError("input_ids: bytes must be whole int32s", param="input_ids")
        array = np.frombuffer(ids, "<i4")
        if array.view("<u4").max() < tokenizer.vocab_size:  # a negative one is a large one
            return array.astype(np.int32, copy=False)
    else:
        try:
            array = np.asarray(ids, np.int64)
        except OverflowError:
            array = np.full(1, -1)
    size = tokenizer.vocab_size
    outside = array[(array < 0) | (array >= size)]
    if len(outside):
        raise BadInputError(f"input_ids: {outside[0]} is not in [0, {size})", param="input_ids")
    return array.astype(np.int32)
