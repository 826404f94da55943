"""The blank that some tokenizers put before the first word of a text.

Given one run of a longer text by itself, the library takes it for the beginning. So a tokenizer
comes in up to three forms: for the beginning, for what follows a special token or a word.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from .token_bytes import component


class Forms(NamedTuple):
    """The same tokenizer three times, or three that differ in their first blank alone."""

    first: Tokenizer
    after_special: Tokenizer
    inside: Tokenizer


def forms_of(inner: Tokenizer) -> Forms:
    """Derive what is needed; tokenizers that add no blank are shared, not copied."""
    parts = {"normalizer": inner.normalizer, "pre_tokenizer": inner.pre_tokenizer}
    specs = {name: component(part) for name, part in parts.items()}
    return Forms(inner, _changed(inner, specs, False), _changed(inner, specs, True))


def _changed(inner: Tokenizer, specs: dict[str, Any], everywhere: bool) -> Tokenizer:
    changed = {name: _without_blank(spec, everywhere) for name, spec in specs.items()}
    if changed == specs:
        return inner
    whole = json.loads(inner.to_str())
    whole |= {name: spec or None for name, spec in changed.items()}
    form = Tokenizer.from_str(json.dumps(whole))
    form.encode_special_tokens = True
    return form


def _without_blank(spec: dict[str, Any], everywhere: bool) -> dict[str, Any]:
    """A normalizer or pre-tokenizer that adds no blank: neither to the first word of a text, nor,
    ``everywhere``, to the first after a special token. {} where nothing is left of it."""
    kind = spec.get("type")
    if kind == "Metaspace" and (everywhere or spec.get("prepend_scheme") == "first"):
        return {**spec, "prepend_scheme": "never"}
    if everywhere and kind == "Prepend":
        return {}
    if everywhere and kind == "ByteLevel" and spec.get("add_prefix_space"):
        return {**spec, "add_prefix_space": False}
    for parts in ("normalizers", "pretokenizers"):
        if parts in spec:
            kept = [_without_blank(part, everywhere) for part in spec[parts]]
            return {**spec, parts: [part for part in kept if part]}
    return spec
