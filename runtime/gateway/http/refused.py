"""What a request may not ask for: refused by name, instead of being left out in silence."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from .errors import bad, cut

log = logging.getLogger(__name__)

_CONSTRAINED = "constrained decoding is not supported"
_REFUSED = {
    **dict.fromkeys(
        (
            "structured_outputs",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "guided_decoding_backend",
            "guided_whitespace_pattern",
            "structural_tag",
            "regex",
            "json_schema",
            "ebnf",
        ),
        _CONSTRAINED,
    ),
    "use_beam_search": "beam search is not supported",
    "suffix": "filling in the middle is not supported",
    "functions": "functions are not supported",
    "function_call": "functions are not supported",
    "audio": "audio is not supported",
    "chat_template": "a request cannot bring its own chat template",
    "chat_template_kwargs": "variables of the chat template are not supported",
    "documents": "documents are not supported",
    "prompt_embeds": "embeddings as a prompt are not supported",
    "input_embeds": "embeddings as a prompt are not supported",
    "image_data": "images are not supported",
    "video_data": "videos are not supported",
    "audio_data": "audio is not supported",
    "allowed_token_ids": "it is not supported",
    "bad_words": "it is not supported",
    "logits_processors": "it is not supported",
    "custom_logit_processor": "it is not supported",
    "custom_params": "it is not supported",
    "logprob_token_ids": "it is not supported",
    "token_ids_logprob": "it is not supported",
    "thinking_token_budget": "it is not supported",
    "truncate_prompt_tokens": "prompts are not cut",
    "kv_transfer_params": "it is not supported",
    "lora_path": "LoRA adapters are not supported",
    "stop_regex": "it is not supported",
    "no_stop_trim": "use include_stop_str_in_output",
    "return_hidden_states": "it is not supported",
    "session_params": "sessions are not supported",
    "priority": "priorities are not supported",
    "prediction": "predicted outputs are not supported",
    "web_search_options": "web search is not supported",
}
_EMPTY = (None, False, 0, "", [], {})


def refuse(body: Mapping[str, Any]) -> None:
    """Raises `HttpError` (400) for the first field that asks for what is not there."""
    for name, why in _REFUSED.items():
        value = body.get(name)
        if value not in _EMPTY:
            raise bad(f"{name}: {why}", name)
    best_of = body.get("best_of")
    if best_of not in (None, 1):
        raise bad("best_of: only 1 is supported", "best_of")
    form = body.get("response_format")
    if form is not None and not (isinstance(form, dict) and form.get("type") == "text"):
        raise bad(f"response_format: {_CONSTRAINED}; only type text is", "response_format")
    modalities = body.get("modalities")
    if modalities not in (None, [], ["text"]):
        raise bad("modalities: only text is supported", "modalities")
    _refuse_tools(body)


def _refuse_tools(body: Mapping[str, Any]) -> None:
    tools, choice = body.get("tools"), body.get("tool_choice")
    if tools is not None and (not isinstance(tools, list) or not tools):
        raise bad("tools must be a list of at least one tool", "tools")
    if tools is None and choice not in (None, "none", "auto"):
        raise bad("tool_choice needs tools", "tool_choice")
    if choice not in (None, "none", "auto"):
        raise bad(f"tool_choice: {_CONSTRAINED}, so no tool can be required", "tool_choice")
    if tools and choice != "none":
        raise bad("tools: calling tools is not supported yet; tool_choice none is", "tools")


def note_unknown(body: Mapping[str, Any], known: frozenset[str]) -> None:
    """One line in the log for fields that mean nothing here."""
    extra = [name for name in body if name not in known and name not in _REFUSED]
    if extra:
        log.info("ignored fields of a request: %s", cut(ascii(", ".join(sorted(extra)))))
