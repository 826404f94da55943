"""All references in one place: this module is the CPU's `Ops`."""

from __future__ import annotations

from .activation import gate, softcap_
from .attention import attention, attention_lse
from .embed import embed
from .hashing import uniform
from .linear import head, linear, linear_add, norm_gate_up, norm_linear
from .norm import add_rms_norm, rms_norm
from .rope import norm_rotate, rope_write
from .sampling import (
    add_at_,
    greedy,
    mask_,
    penalize_,
    sample,
    token_logprobs,
    top_logprobs,
)
from .step import enter_decode, take_greedy

WIDE_RESIDUAL = True
"""On the CPU a float32 residual costs next to nothing."""

__all__ = [
    "WIDE_RESIDUAL",
    "add_at_",
    "add_rms_norm",
    "attention",
    "attention_lse",
    "embed",
    "enter_decode",
    "gate",
    "greedy",
    "head",
    "linear",
    "linear_add",
    "mask_",
    "norm_gate_up",
    "norm_linear",
    "norm_rotate",
    "penalize_",
    "rms_norm",
    "rope_write",
    "sample",
    "softcap_",
    "take_greedy",
    "token_logprobs",
    "top_logprobs",
    "uniform",
]
