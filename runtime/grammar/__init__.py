"""Constraints on output: specs, what compiles them, and matchers that say which token may come."""

from .compile import compile_spec
from .compiler import Compiler
from .matcher import Grammar, Matcher
from .pending import Pending
from .spec import Spec
from .vocabulary import Vocabulary

__all__ = [
    "Compiler",
    "Grammar",
    "Matcher",
    "Pending",
    "Spec",
    "Vocabulary",
    "compile_spec",
]
