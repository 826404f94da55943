"""The body of a request for a response. What is optional may also be null."""

from __future__ import annotations

from typing import Any

from ....protocol.sampling import Constraint
from ..constrained import constraint_of
from ..errors import bad, cut
from ..forms import OpenAIForm, check_top
from ..tools.offered import Offer, read_offer

LOGPROBS = "message.output_text.logprobs"
_IGNORED = frozenset(("reasoning.encrypted_content",))
"""Asked for by clients out of habit; there is nothing of the kind to give."""
_MOST_METADATA = 16


class ResponseForm(OpenAIForm, kw_only=True):
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: dict[str, str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    truncation: str | None = None
    conversation: str | dict[str, Any] | None = None
    context_management: list[dict[str, Any]] | None = None
    prompt: Any = None
    user: str | None = None
    explain: bool | None = None

    def check(self) -> None:
        if self.max_output_tokens is not None:
            self.max_tokens = self.max_output_tokens
        super().check()
        if self.max_tokens == 0:
            raise bad("max_output_tokens must be at least 1", "max_output_tokens")
        if self.n not in (None, 1):
            raise bad("n: a response has one answer", "n")
        if not self.input and not self.previous_response_id:
            raise bad("input is missing or empty", "input")
        for name in self.include or ():
            if name != LOGPROBS and name not in _IGNORED:
                raise bad(f"include: {name[:80]!r} is not supported", "include")
        check_top("top_logprobs", self.top_logprobs)
        if self.truncation not in (None, "disabled"):
            raise bad("truncation: only disabled is supported; prompts are not cut", "truncation")
        if self.conversation is not None:
            raise bad("conversation: use previous_response_id", "conversation")
        if self.context_management:
            raise bad("context_management: prompts are not cut", "context_management")
        if self.prompt is not None:
            raise bad("prompt: none are stored here; write instructions and input", "prompt")
        if self.prompt_logprobs is not None:
            raise bad("prompt_logprobs: a response has no place for them", "prompt_logprobs")
        if self.background and self.store is False:
            raise bad("background needs store: nobody could read the answer", "background")
        if self.background and self.stream:
            raise bad("background: such an answer cannot be streamed", "background")
        if self.metadata and len(self.metadata) > _MOST_METADATA:
            raise bad(f"metadata holds at most {_MOST_METADATA} entries", "metadata")

    @property
    def logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    @property
    def format(self) -> dict[str, Any]:
        """How the text is to look. Raises `HttpError`."""
        found = (self.text or {}).get("format") or {"type": "text"}
        if not isinstance(found, dict):
            raise bad("text.format must be an object", "text")
        return found

    @property
    def constraint(self) -> Constraint | None:
        """What the text must match. Raises `HttpError`."""
        form = self.format
        kind = form.get("type")
        if kind not in ("text", "json_object", "json_schema"):
            raise bad(
                f"text.format: type {cut(str(kind), 40)} is not supported; text, json_object and"
                " json_schema are",
                "text",
            )
        if kind == "json_schema":
            if not isinstance(form.get("schema"), dict | bool):
                raise bad("text.format.schema is missing", "text")
            form = {"type": kind, "json_schema": form}
        return constraint_of(form, self.structured_outputs)

    @property
    def offer(self) -> Offer | None:
        """The tools that may be called, which are written flat here. Raises `HttpError`."""
        choice = self.tool_choice
        tools = [_nested(tool) for tool in self.tools or ()]
        return read_offer(tools or None, choice, self.parallel_tool_calls)

    @property
    def template_variables(self) -> dict[str, Any]:
        """What the chat template gets beside the messages."""
        given = dict(self.chat_template_kwargs or {})
        effort = (self.reasoning or {}).get("effort")
        if effort is not None:
            given.setdefault("reasoning_effort", effort)
        return given

    def sampling(self) -> dict[str, Any]:
        given = super().sampling()
        if self.logprobs:
            given["return_logprob"] = True
        given["top_logprobs_num"] = self.top_logprobs or 0
        return given


def _nested(tool: dict[str, Any]) -> dict[str, Any]:
    """As chats have it."""
    if tool.get("type") != "function" or "function" in tool:
        return tool
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
