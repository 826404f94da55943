"""From what the user asked to what the engine is told: lengths, seeds and stops made concrete."""

from __future__ import annotations

from ..protocol.errors import BadInputError, ContextLengthError
from ..protocol.messages import EngineSampling
from ..protocol.sampling import SamplingParams
from .tokenizer import Tokenizer

DEFAULT_NEW_TOKENS = 1024
MAX_SEED = 2**63 - 1


def resolve(
    params: SamplingParams,
    seed: int,
    prompt_tokens: int,
    context_length: int,
    tokenizer: Tokenizer,
) -> EngineSampling:
    """Raises `ContextLengthError` for a prompt that leaves no room, `BadInputError` for an empty
    prompt and for token ids outside the vocabulary."""
    params.check_ids(tokenizer.vocab_size)
    if prompt_tokens == 0:
        raise BadInputError("the prompt is empty, and the model has no token to start from")
    room = context_length - prompt_tokens
    wanted = params.max_new_tokens
    if room < 0 or (room == 0 and wanted != 0):
        raise ContextLengthError(
            f"the prompt has {prompt_tokens} tokens; the context holds {context_length},"
            " the answer included"
        )
    length = min(room, DEFAULT_NEW_TOKENS if wanted is None else wanted)
    stop_ids = params.stop_token_ids
    if not params.ignore_eos:
        stop_ids = tuple(dict.fromkeys((*tokenizer.eos_ids, *stop_ids)))
    start = params.logprob_start_len if params.return_logprob else -1
    return EngineSampling(
        max_new_tokens=length,
        min_new_tokens=min(params.min_new_tokens, length),
        stops=tuple(stop.encode("utf-8", "replace") for stop in params.stop),
        stop_ids=stop_ids,
        temperature=0.0 if params.greedy else params.temperature,
        top_p=params.top_p,
        top_k=min(params.top_k, tokenizer.vocab_size),
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty,
        seed=seed & MAX_SEED,
        bias_ids=tuple(params.logit_bias),
        bias_values=tuple(params.logit_bias.values()),
        logprobs=params.return_logprob or params.top_logprobs_num > 0,
        top_logprobs=params.top_logprobs_num,
        logprob_start=start if start < prompt_tokens else -1,
        constraint=params.constraint,
        jump_forward=params.jump_forward,
    )
