"""What a request may not ask for: refused by name, instead of being left out in silence."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from .errors import bad, cut

log = logging.getLogger(__name__)

_WRITE = "this field is of the past; write structured_outputs: "
_NATIVE = "only /generate takes this in sampling_params; write structured_outputs: "
_REFUSED = {
    "guided_json": _WRITE + '{"json": …}',
    "guided_regex": _WRITE + '{"regex": …}',
    "guided_choice": _WRITE + '{"choice": […]}',
    "guided_grammar": _WRITE + '{"grammar": …}',
    "guided_json_object": _WRITE + '{"json_object": true}',
    "guided_decoding_backend": "the server chooses; see its grammar_backend setting",
    "guided_whitespace_pattern": "blanks in JSON are bounded by the server",
    "structured_outputs": "it is not supported here",
    "structural_tag": "it is not supported; write structured_outputs with json or grammar",
    "regex": _NATIVE + '{"regex": …}',
    "json_schema": _NATIVE + '{"json": …}',
    "ebnf": _NATIVE + '{"grammar": …}',
    "heal": "only /generate takes this, in sampling_params, and the gens of programs",
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
    "prediction": "predicted outputs are not supported",
    "web_search_options": "web search is not supported",
}
_MOST_NOTED = 1000
_noted: set[str] = set()
_NO_TOOLS = (None, "none", "auto")
_EMPTY = (None, False, 0, "", [], {})


def refuse(body: Mapping[str, Any], known: frozenset[str] = frozenset()) -> None:
    """Raises `HttpError` (400) for the first field that asks for what is not there. ``known``: the
    fields of the request's own form, which looks at them itself."""
    for name, why in _REFUSED.items():
        if name not in known and body.get(name) not in _EMPTY:
            raise bad(f"{name}: {why}", name)
    best_of = body.get("best_of")
    if best_of not in (None, 1):
        raise bad("best_of: only 1 is supported", "best_of")
    form = body.get("response_format")
    plain = form is None or (isinstance(form, dict) and form.get("type") == "text")
    if "response_format" not in known and not plain:
        raise bad("response_format: only type text is supported here", "response_format")
    modalities = body.get("modalities")
    if modalities not in (None, [], ["text"]):
        raise bad("modalities: only text is supported", "modalities")
    if "tools" not in known:
        for name, unset in (("tools", _EMPTY), ("tool_choice", _NO_TOOLS)):
            if body.get(name) not in unset:
                raise bad(f"{name}: only chat completions and responses call tools", name)


def note_unknown(body: Mapping[str, Any], known: frozenset[str]) -> None:
    """One line in the log for fields that mean nothing here, and none when they come again."""
    extra = [name for name in body if name not in known and name not in _REFUSED]
    if not extra or len(_noted) >= _MOST_NOTED:
        return
    line = cut(ascii(", ".join(sorted(extra))))
    if line not in _noted:
        _noted.add(line)
        log.info("ignored fields of a request: %s", line)
