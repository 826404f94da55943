"""Which specs are of a regular language, and their trees."""

from __future__ import annotations

from functools import lru_cache

from .checks_grammar import ROOT, check_gbnf, is_lark
from .checks_regex import language_of
from .doubling import without_doubling
from .lexemes import regular_rules
from .regex_tree import Tree
from .spec import Spec


@lru_cache(maxsize=8)
def regular_tree(spec: Spec) -> Tree | None:
    """The language without its prefix, as far as it is known to be regular: that of a ``regex``, a
    ``choice``, or GBNF none of whose rules leads back to itself. Raises `GrammarError` for a wrong
    spec."""
    if spec.kind in ("regex", "choice"):
        return language_of(spec).tree
    if spec.kind != "ebnf" or is_lark(spec.text):
        return None
    return regular_rules(without_doubling(check_gbnf(spec.text))).get(ROOT)
