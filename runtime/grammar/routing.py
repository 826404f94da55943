"""Which backends are asked for a spec, in which order. One table."""

from __future__ import annotations

from ..protocol.errors import BadInputError
from .backend import Backend

ROUTES: dict[str, tuple[str, ...]] = {
    "regex": ("automaton", "llguidance"),
    "choice": ("automaton", "llguidance"),
    "json_schema": ("llguidance",),
    "ebnf": ("automaton", "llguidance"),
}
"""What outlines-core takes the automaton takes too, mostly sooner and in a fraction of the memory:
outlines is there for who pins it, and to compare with."""

BACKENDS = ("outlines", "automaton", "llguidance")


def route(kind: str, pinned: str = "auto", *, prefixed: bool = False) -> tuple[str, ...]:
    """Names of the backends to try for a kind of spec; only ``pinned`` where that is not auto.
    ``prefixed``: behind the end of a prompt, of which there are many, each used a few times.

    Raises `BadInputError` for an unknown name.
    """
    if pinned == "auto":
        names = ROUTES[kind]
        # Rows are quick once they are made, but making them takes a while.
        return tuple(sorted(names, key=lambda name: name != "llguidance")) if prefixed else names
    if pinned not in BACKENDS:
        known = ", ".join(("auto", *BACKENDS))
        raise BadInputError(
            f"unknown grammar backend {pinned!r}; known are {known}", param="grammar_backend"
        )
    return (pinned,)


def make_backend(name: str) -> Backend:
    """A backend by its name; its library is imported at its first use."""
    if name == "outlines":
        from .outlines_backend import OutlinesBackend

        return OutlinesBackend()
    if name == "automaton":
        from .automaton_backend import AutomatonBackend

        return AutomatonBackend()
    from .llguidance_backend import LLGuidanceBackend

    return LLGuidanceBackend()
