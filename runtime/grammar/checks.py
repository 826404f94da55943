"""What is wrong with a spec, found before anything is queued or compiled."""

from __future__ import annotations

import json

from ..protocol.errors import GrammarError
from .spec import Spec

MAX_CHARACTERS = 1_000_000
MAX_CHOICES = 20_000


def check_spec(spec: Spec) -> None:
    """Cheap and static. Raises `GrammarError` that names what is wrong and where."""
    if len(spec.text) > MAX_CHARACTERS:
        raise GrammarError(
            f"the {spec.kind} has {len(spec.text)} characters; {MAX_CHARACTERS} are the most"
        )
    if spec.kind == "choice":
        _check_choices(spec.text)


def _check_choices(text: str) -> None:
    try:
        choices = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"choices must be a JSON list of strings: {error}") from None
    if not isinstance(choices, list):
        raise GrammarError("choices must be a list of strings")
    if not choices:
        raise GrammarError("there is no choice to choose from")
    if len(choices) > MAX_CHOICES:
        raise GrammarError(f"{len(choices)} choices are given; {MAX_CHOICES} are the most")
    for i, choice in enumerate(choices):
        if not isinstance(choice, str):
            raise GrammarError("a choice must be a string", where=f"choice {i}")
        try:
            choice.encode()
        except UnicodeEncodeError:
            raise GrammarError("half of a surrogate pair", where=f"choice {i}") from None
