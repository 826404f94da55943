"""What a library that compiles specs must offer."""

from __future__ import annotations

from typing import Protocol

from .matcher import Grammar
from .spec import Spec
from .vocabulary import Vocabulary


class Refused(Exception):  # noqa: N818
    """A spec this backend turns out not to be good for (too large, a construct it lacks): the next
    backend of the route is tried. The reason is its text. A spec that is simply wrong is a
    `GrammarError` instead, and no other backend is tried."""


class Backend(Protocol):
    """Compiles specs for one vocabulary at a time. Holds no state of requests.

    Compiling is in two halves: `try_in_worker` runs first, in a process that may be killed or run
    out of memory, and returns what `finish` needs to make the grammar fast in the engine. Both are
    given equal specs and vocabularies (the worker's has no encoder).
    """

    @property
    def name(self) -> str: ...

    def supports(self, spec: Spec) -> str | None:
        """Why this backend does not take the spec, or None. Static and cheap. Raises
        `GrammarError` for a spec that is wrong whatever the backend."""
        ...

    def try_in_worker(self, spec: Spec, vocabulary: Vocabulary) -> bytes:
        """Compile where nothing can be harmed. Raises `GrammarError`, `Refused`."""
        ...

    def finish(self, spec: Spec, vocabulary: Vocabulary, data: bytes) -> Grammar:
        """The grammar from what `try_in_worker` returned. Raises `GrammarError`, `Refused`."""
        ...

    def compile(self, spec: Spec, vocabulary: Vocabulary) -> Grammar:
        """Both halves here, with no deadline: for tests and trusted specs."""
        ...
