"""The words processes speak to each other, and the errors users catch. Torch-free."""

from __future__ import annotations

from .errors import (
    AbortedError,
    BackendError,
    BadInputError,
    ContextLengthError,
    ErrorInfo,
    GrammarError,
    MissingValueError,
    ModelError,
    ProgramError,
    RametError,
)
from .meta import ChoiceScore, FinishReason, LogprobEntry, MetaInfo
from .sampling import Constraint, SamplingParams, sampling_from

__all__ = [
    "AbortedError",
    "BackendError",
    "BadInputError",
    "ChoiceScore",
    "Constraint",
    "ContextLengthError",
    "ErrorInfo",
    "FinishReason",
    "GrammarError",
    "LogprobEntry",
    "MetaInfo",
    "MissingValueError",
    "ModelError",
    "ProgramError",
    "RametError",
    "SamplingParams",
    "sampling_from",
]
