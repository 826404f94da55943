"""Which parser reads which model's calls."""

from __future__ import annotations

from .deepseek import DeepSeekParser
from .hermes import HermesParser
from .llama3 import Llama3Parser
from .machine import ToolParser
from .mistral import MistralParser
from .pythonic import PythonicParser

PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "qwen": HermesParser,
    "qwen25": HermesParser,
    "llama3": Llama3Parser,
    "llama3_json": Llama3Parser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
    "llama4_pythonic": PythonicParser,
    "deepseek": DeepSeekParser,
    "deepseekv3": DeepSeekParser,
    "deepseek_v3": DeepSeekParser,
    "deepseekv31": DeepSeekParser,
    "deepseek_v31": DeepSeekParser,
}
"""By the names that people know from other servers."""

_SIGNS: tuple[tuple[str, type[ToolParser]], ...] = (
    ("[TOOL_CALLS]", MistralParser),
    ("tool▁call", DeepSeekParser),
    ("<tool_call>", HermesParser),
    ("<|python_start|>", PythonicParser),
    ("[func_name1(", PythonicParser),
    ("<|python_tag|>", Llama3Parser),
    ('"parameters": dictionary of argument', Llama3Parser),
)


def parser_class(setting: str, template: str | None) -> type[ToolParser] | None:
    """By ``--tool-call-parser``: a name, ``none``, or ``auto``, which looks at the chat template.
    A template that knows no tools gets Hermes' form, which is then written for it."""
    if setting == "none":
        return None
    if setting != "auto":
        return PARSERS[setting]
    template = template or ""
    for sign, parser in _SIGNS:
        if sign in template:
            return parser
    return HermesParser
