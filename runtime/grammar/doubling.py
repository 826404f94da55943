"""Rules that begin and end with themselves, said as repeats.

``e ::= e "+" e | e e | n`` derives what ``e ::= n (("+")? n)*`` derives, but each text in as many
ways as it can be put in brackets, and a parser that follows all of them at once takes longer with
every token.
"""

from __future__ import annotations

from .gbnf import Alt, Expr, Ref, Rep, Rules, Seq


def without_doubling(rules: Rules) -> Rules:
    """Rules of the same languages, none of which has an alternative that begins and ends with the
    rule itself. What is repeated is a rule of its own, by a name that no grammar can write."""
    found: Rules = {}
    for name, expr in rules.items():
        own = Ref(name)
        between: list[Expr] = []
        rest: list[Expr] = []
        for part in _alternatives(expr):
            inner = part.parts if isinstance(part, Seq) else ()
            if len(inner) > 1 and inner[0] == inner[-1] == own:
                between.append(Seq(inner[1:-1]))
            elif part != own:  # which says nothing
                rest.append(part)
        if not between or not rest:
            found[name] = expr
            continue
        one = Ref(name + "'")
        found[name] = Seq((one, Rep(Seq((Alt(tuple(between)), one)), 0, None)))
        found[one.name] = Alt(tuple(rest))
    return found


def _alternatives(expr: Expr) -> list[Expr]:
    """Brackets around alternatives alone say nothing."""
    if isinstance(expr, Alt):
        return [inner for part in expr.parts for inner in _alternatives(part)]
    if isinstance(expr, Seq) and len(expr.parts) == 1:
        return _alternatives(expr.parts[0])
    return [expr]
