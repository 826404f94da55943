"""How tokens are chosen: one validated, immutable set of parameters for one generation."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from .errors import BadInputError

GREEDY_BELOW = 1e-5
MAX_STOPS = 64
MAX_STOP_BYTES = 1024
MAX_TOP_LOGPROBS = 100
MAX_SAMPLES = 1024
LEAST_PENALTY, MOST_BIAS = 1e-6, 1e30
"""What float32 still tells from 0 and from infinity after a multiplication or two."""

ALIASES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "sampling_seed": "seed",
}


CONSTRAINTS = {"regex": "regex", "json_schema": "json_schema", "ebnf": "ebnf"}
"""Sampling parameters that are a constraint, and its kind: SGLang's spelling."""


class Constraint(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the output must match. ``kind``: regex, json_schema, ebnf or choice (``spec`` is a JSON
    list of strings). ``whitespace`` between the tokens of JSON: none, or a little (flexible).
    ``after``: text, the end of a model's thinking, up to which nothing is constrained."""

    kind: str
    spec: str
    whitespace: Literal["compact", "flexible"] = "compact"
    after: str = ""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All knobs of one generation, with SGLang's names. ``top_k`` -1 is off; ``temperature`` under
    1e-5 is greedy; ``max_new_tokens`` ``None`` means what the context leaves, 1,024 at most, and 0
    scores the prompt only. Log-probs are natural and of the raw logits. ``heal``: the last tokens
    of the prompt's text may be cut otherwise, together with what follows them. ``explain``: the
    meta info says where the prompt left what was cached."""

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    seed: int | None = None
    logit_bias: dict[int, float] = {}
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    skip_special_tokens: bool = True
    constraint: Constraint | None = None
    jump_forward: bool = True
    heal: bool = False
    explain: bool = False

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken at every step."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    def check(self, vocab_size: int | None = None) -> SamplingParams:
        """Return self, or raise `BadInputError` naming the first parameter out of range."""
        for name in _FLOATS:
            if not math.isfinite(getattr(self, name)):
                raise _bad(name, getattr(self, name), "a finite number")
        for name in _INTS:
            if not -(2**63) <= (getattr(self, name) or 0) < 2**63:
                raise _bad(name, getattr(self, name), "a 64-bit integer")
        if self.max_new_tokens is not None and self.max_new_tokens < 0:
            raise _bad("max_new_tokens", self.max_new_tokens, ">= 0")
        if self.min_new_tokens < 0 or (
            self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens
        ):
            raise _bad("min_new_tokens", self.min_new_tokens, "in [0, max_new_tokens]")
        if not 1 <= self.n <= MAX_SAMPLES:
            raise _bad("n", self.n, f"in [1, {MAX_SAMPLES}]")
        if self.temperature < 0:
            raise _bad("temperature", self.temperature, ">= 0")
        if not 0 < self.top_p <= 1:
            raise _bad("top_p", self.top_p, "in (0, 1]")
        if self.top_k < -1 or (self.top_k == 0):
            raise _bad("top_k", self.top_k, ">= 1, or -1 for off")
        if not 0 <= self.min_p <= 1:
            raise _bad("min_p", self.min_p, "in [0, 1]")
        for name in ("frequency_penalty", "presence_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise _bad(name, getattr(self, name), "in [-2, 2]")
        if not LEAST_PENALTY <= self.repetition_penalty <= 2:
            wanted = f"in [{LEAST_PENALTY:g}, 2]"
            raise _bad("repetition_penalty", self.repetition_penalty, wanted)
        if not 0 <= self.top_logprobs_num <= MAX_TOP_LOGPROBS:
            raise _bad("top_logprobs_num", self.top_logprobs_num, f"in [0, {MAX_TOP_LOGPROBS}]")
        if self.logprob_start_len < -1:
            raise _bad("logprob_start_len", self.logprob_start_len, ">= -1")
        if len(self.stop) > MAX_STOPS:
            raise _bad("stop", f"{len(self.stop)} strings", f"at most {MAX_STOPS} strings")
        for text in self.stop:
            if not text:
                raise _bad("stop", text, "non-empty strings")
            try:
                size = len(text.encode())
            except UnicodeEncodeError:
                raise _bad("stop", text, "text without half characters") from None
            if size > MAX_STOP_BYTES:
                raise _bad("stop", text[:40] + "…", f"strings of at most {MAX_STOP_BYTES} bytes")
        if vocab_size is not None:
            self.check_ids(vocab_size)
        for token, bias in self.logit_bias.items():
            if not abs(bias) <= MOST_BIAS:  # nor is it NaN
                raise _bad("logit_bias", {token: bias}, f"numbers of at most ±{MOST_BIAS:g}")
        return self

    def check_ids(self, vocab_size: int) -> None:
        """The part of `check` that needs to know the vocabulary."""
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", self.logit_bias),
        ):
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise _bad(name, token, f"token ids in [0, {vocab_size})")


_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)
_INTS = (
    "max_new_tokens",
    "min_new_tokens",
    "n",
    "top_k",
    "seed",
    "logprob_start_len",
    "top_logprobs_num",
)
FIELDS = frozenset(SamplingParams.__struct_fields__)


def _bad(name: str, value: object, allowed: str) -> BadInputError:
    return BadInputError(f"{name} must be {allowed}, not {value!r}", param=name)


def sampling_from(*layers: Mapping[str, Any]) -> SamplingParams:
    """Merge layers (later ones win, ``None`` inherits) into checked `SamplingParams`.

    Raises `BadInputError` for an unknown name, a wrong type or a value out of range.
    """
    key = _key(layers)
    if key is None:
        return _checked(layers)
    known = _known.get(key)
    if known is None:
        known = _checked(layers)
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[key] = known
    return known


_known: dict[Any, SamplingParams] = {}
"""What was found right, of late: most requests come with the parameters of the one before."""
_MOST_KNOWN = 256
_LONGEST_KNOWN = 256
_PLAIN: frozenset[object] = frozenset((int, float, bool, type(None)))


def _key(layers: tuple[Mapping[str, Any], ...]) -> Any:
    """Names, values and types (1, 1.0 and True are equal) of small plain layers, else ``None``."""
    key: list[Any] = []
    for layer in layers:
        key.append(len(layer))
        for name, value in layer.items():
            kind: object = value.__class__
            if kind not in _PLAIN and not (kind is str and len(value) <= _LONGEST_KNOWN):
                return None
            key += (name, kind, value)
    return tuple(key)


def _checked(layers: tuple[Mapping[str, Any], ...]) -> SamplingParams:
    merged: dict[str, Any] = {}
    for layer in layers:
        given: dict[str, Any] = {}
        for key, value in layer.items():
            name = ALIASES.get(key, key)
            if name not in FIELDS and name not in CONSTRAINTS:
                raise BadInputError(f"unknown sampling parameter {key!r}", param=key)
            if value is not None:
                given[name] = value
        merged |= _with_constraint(given)
    stop = merged.get("stop")
    if isinstance(stop, str):
        merged["stop"] = (stop,) if stop else ()
    ids = merged.get("stop_token_ids")
    if isinstance(ids, int):
        merged["stop_token_ids"] = (ids,)
    if merged.get("top_k") == 0:
        merged["top_k"] = -1
    bias = merged.get("logit_bias")
    if isinstance(bias, Mapping):
        try:
            merged["logit_bias"] = {int(token): float(b) for token, b in bias.items()}  # pyright: ignore
        except (TypeError, ValueError):
            raise _bad("logit_bias", merged["logit_bias"], "a map from id to number") from None
    try:
        params = msgspec.convert(merged, SamplingParams)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        name = path.rstrip("`").split("[")[0] or None
        raise BadInputError(f"{name or 'sampling'}: {message}", param=name) from None
    return params.check()


def _with_constraint(given: dict[str, Any]) -> dict[str, Any]:
    """A layer's regex, json_schema or ebnf as its constraint."""
    names = [name for name in (*CONSTRAINTS, "constraint") if name in given]
    if len(names) > 1:
        raise BadInputError(
            f"at most one constraint can be given, not {' and '.join(names)}", param=names[1]
        )
    if not names or names[0] == "constraint":
        return given
    (name,) = names
    spec = given.pop(name)
    if name == "json_schema" and isinstance(spec, (Mapping, bool)):
        try:
            spec = json.dumps(spec, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadInputError(f"json_schema is no JSON: {error}", param=name) from None
    if not isinstance(spec, str):
        allowed = "text or a dict" if name == "json_schema" else "text"
        raise BadInputError(f"{name} must be {allowed}, not {type(spec).__name__}", param=name)
    return {**given, "constraint": {"kind": CONSTRAINTS[name], "spec": spec}}
