"""What an output must match, as data: one immutable `Spec`."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from ..protocol.errors import GrammarError

Kind = Literal["regex", "json_schema", "ebnf", "choice"]
Whitespace = Literal["compact", "flexible"]

KINDS: tuple[str, ...] = get_args(Kind)

FLEXIBLE_WHITESPACE = r"[ ]?|\n[ \t]{0,40}"
"""What may stand between two JSON tokens where output may be pretty: bounded, because small models
loop on free whitespace. ``compact`` allows nothing there."""


_NORMALIZED = 64 << 10
"""Characters of JSON that are read anew for a key."""


@dataclass(frozen=True)
class Spec:
    """A constraint. ``text`` is the regex, the JSON schema, the grammar, or for ``choice`` a JSON
    list of strings. ``whitespace`` is about JSON output only, and the same for every backend.
    ``prefix`` is text that comes before what must match: the end of a prompt, written anew."""

    kind: Kind
    text: str
    whitespace: Whitespace = "compact"
    prefix: str = ""

    @classmethod
    def of(cls, kind: str, spec: Any, whitespace: Whitespace = "compact", prefix: str = "") -> Spec:
        """From what users give: schemas may be dicts or booleans, choices lists of strings.

        Raises `GrammarError` for an unknown kind or a spec of the wrong type.
        """
        if kind not in KINDS:
            raise GrammarError(f"unknown kind of grammar {kind!r}; known are {', '.join(KINDS)}")
        if kind == "json_schema" and isinstance(spec, (Mapping, bool)):
            spec = _dump(spec)
        elif kind == "choice" and isinstance(spec, (list, tuple)):
            spec = _dump(list(spec))
        if not isinstance(spec, str):
            raise GrammarError(f"a {kind} must be a string, not {type(spec).__name__}")
        try:
            spec.encode()
        except UnicodeEncodeError as error:
            where = f"character {error.start}"
            raise GrammarError(f"the {kind} holds half of a surrogate pair", where=where) from None
        return cls(kind, spec, whitespace, prefix)  # type: ignore[arg-type]

    @cached_property
    def key(self) -> str:
        """The same for specs that mean the same whatever their layout, but for very long ones, as
        the engine makes keys: 64 hex digits."""
        text = self.text
        if self.kind in ("json_schema", "choice") and len(text) <= _NORMALIZED:
            # A broken one is keyed by its text, so that its refusal is remembered.
            with contextlib.suppress(ValueError, RecursionError):
                text = json.dumps(json.loads(text), separators=(",", ":"))
        digest = hashlib.sha256()
        for part in (self.kind, self.whitespace, self.prefix, text):
            data = part.encode(errors="surrogatepass")
            digest.update(len(data).to_bytes(8, "little") + data)
        return digest.hexdigest()


def _dump(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"not JSON: {error}") from None
