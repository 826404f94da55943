"""What one chat asks of the model: its prompt, its constraint, and how the answer is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from ...protocol.sampling import Constraint
from ..request import IntArray
from .constrained import call_form
from .depth import check_depth
from .errors import bad
from .prompts import prompt_of_messages
from .reasoning import begins_inside, think_tags
from .state import Live
from .tools.offered import Offer
from .voice import Voice, voice_of


@dataclass(frozen=True, slots=True)
class Asked:
    """``sampling``: what is to be added to the sampling parameters."""

    ids: IntArray
    voice: Voice
    sampling: dict[str, Any]


async def ask(
    live: Live,
    messages: Sequence[Mapping[str, Any]],
    *,
    offer: Offer | None = None,
    constraint: Constraint | None = None,
    separate: bool = True,
    answer: bool = True,
    go_on: bool = False,
    variables: Mapping[str, Any] | None = None,
    template: str | None = None,
) -> Asked:
    """``offer``: the tools that may or must be called. ``constraint``: what the content must match.
    ``separate``: whether thinking is parted from content. ``answer``, ``go_on``, ``variables`` and
    ``template`` are as in `prompt_of_messages`. Raises `HttpError` and `BadInputError`."""
    if template is not None and not live.trust_template:
        raise bad(
            "chat_template: this server takes none from requests (trust_request_chat_template)",
            "chat_template",
        )
    check_depth(variables, "chat_template_kwargs", "chat_template_kwargs")
    if offer is not None and offer.forced and go_on:
        raise bad(
            "continue_final_message: not where a tool must be called", "continue_final_message"
        )
    if offer is not None and constraint is not None:
        raise bad(
            "response_format and structured_outputs: not with tools that may be called",
            "response_format",
        )
    source = live.executor.tokenizer.chat_template if template is None else template
    voice = Voice()

    def then(opening: str) -> str:
        nonlocal voice, constraint
        voice = voice_of(live, opening, offer, separate)
        if go_on:
            voice = replace(voice, inside=False)
        if offer is not None and voice.parser is None:
            raise bad("tools: this server parses no calls (tool_call_parser)", "tools")
        thought, end = ("", "") if go_on else _thinking(live, opening, source or "")
        if offer is not None and offer.forced:
            assert voice.parser is not None
            constraint, parser, begun = call_form(voice.parser, offer, bool(end))
            voice = replace(voice, parser=parser, given=begun)
        if constraint is not None and end:
            constraint = msgspec.structs.replace(constraint, after=end)
            voice = replace(voice, inside=True)
            return thought
        return voice.given

    prompt = await prompt_of_messages(
        live.executor,
        messages,
        answer=answer,
        go_on=go_on,
        tools=() if offer is None else offer.tools,
        variables=variables,
        template=template,
        then=then,
    )
    sampling: dict[str, Any] = {}
    if constraint is not None:
        sampling["constraint"] = msgspec.to_builtins(constraint)
    if voice.hides_marks(live.executor.tokenizer):
        sampling["skip_special_tokens"] = False
    return Asked(prompt.ids, voice, sampling)


def _thinking(live: Live, opening: str, template: str) -> tuple[str, str]:
    """Where the model thinks before it answers: how its thinking must be begun for it, if the
    prompt does not, and the tag that ends it. Nothing where it does not think.

    A template with a switch for thinking leaves it to the model to begin. Nothing would say whether
    it does, so it is begun here.
    """
    tags = think_tags(live.reasoning_parser, template)
    if tags is None:
        return "", ""
    if begins_inside(tags, opening):
        return "", tags.end
    if tags.end in opening or "enable_thinking" not in template:
        return "", ""
    return tags.start + "\n", tags.end
