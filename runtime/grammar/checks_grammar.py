"""What is wrong with a grammar: rules that are missing, that never end, or that are too many."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache

from ..protocol.errors import GrammarError
from .gbnf import Alt, Expr, Ref, Rep, Rules, Seq, parse_gbnf
from .regex_tree import NOTHING

ROOT = "root"
_LARK = re.compile(r"(?m)^[ \t]*(%llguidance\b|[?!]?start\b[^:\n]*:(?!:=))")
_GBNF = re.compile(r"(?m)^[ \t]*[A-Za-z0-9_-]+[ \t]*::=")


def is_lark(text: str) -> bool:
    """Whether a grammar is written in llguidance's dialect of Lark and not in GBNF."""
    return not _GBNF.search(text) and _LARK.search(text) is not None


@lru_cache(maxsize=16)
def check_gbnf(text: str) -> Rules:
    """The rules that the root uses. Raises `GrammarError` naming what is wrong and where."""
    rules = parse_gbnf(text)
    if ROOT not in rules:
        names = ", ".join(list(rules)[:5])
        raise GrammarError(f"the grammar has no rule named root; it has {names[:120]}")
    for name, expr in rules.items():
        for other in refs(expr):
            if other not in rules:
                raise GrammarError(f"there is no rule {other[:60]!r}", where=f"rule {name[:60]}")
    used = _used(rules)
    ending = _productive(used)
    endless = [name for name in used if name not in ending]
    if endless:
        raise GrammarError(
            "the rule has no end: no text can match it", where=f"rule {endless[0][:60]}"
        )
    return used


def refs(expr: Expr) -> Iterator[str]:
    """Names of the rules an expression refers to."""
    if isinstance(expr, Ref):
        yield expr.name
    elif isinstance(expr, (Seq, Alt)):
        for part in expr.parts:
            yield from refs(part)
    elif isinstance(expr, Rep):
        yield from refs(expr.body)


def _used(rules: Rules) -> Rules:
    seen = {ROOT}
    todo = [ROOT]
    while todo:
        for name in refs(rules[todo.pop()]):
            if name not in seen:
                seen.add(name)
                todo.append(name)
    return {name: expr for name, expr in rules.items() if name in seen}


def _productive(rules: Rules) -> set[str]:
    return settle(rules, lambda name, found: _ends(rules[name], found))


def settle(rules: Rules, holds: Callable[[str, set[str]], bool]) -> set[str]:
    """The rules of which something holds, given those of which it is known to hold already: asked
    until nothing changes, a rule again only when one it refers to has been found."""
    users: dict[str, list[str]] = {}
    for name, expr in rules.items():
        for other in set(refs(expr)):
            users.setdefault(other, []).append(name)
    found: set[str] = set()
    todo = list(rules)
    while todo:
        name = todo.pop()
        if name not in found and holds(name, found):
            found.add(name)
            todo += users.get(name, ())
    return found


def _ends(expr: Expr, ending: set[str]) -> bool:
    if isinstance(expr, Ref):
        return expr.name in ending
    if isinstance(expr, Seq):
        return all(_ends(part, ending) for part in expr.parts)
    if isinstance(expr, Alt):
        return any(_ends(part, ending) for part in expr.parts)
    if isinstance(expr, Rep):
        return expr.low == 0 or _ends(expr.body, ending)
    return expr != NOTHING
