"""Which decoder runs which architecture."""

from __future__ import annotations

from ...protocol.errors import ModelError
from .decoder import Decoder
from .gemma3 import Gemma3Decoder
from .llama import LlamaDecoder

FAMILIES: dict[str, type[Decoder]] = {
    name: family for family in (LlamaDecoder, Gemma3Decoder) for name in family.architectures
}


def family_of(architecture: str) -> type[Decoder]:
    """The decoder class. Raises `ModelError` that lists the known ones."""
    family = FAMILIES.get(architecture)
    if family is None:
        raise ModelError(f"no decoder for {architecture!r}; known: {', '.join(sorted(FAMILIES))}")
    return family
