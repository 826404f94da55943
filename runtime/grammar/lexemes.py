"""A grammar as rules over lexemes, cut so that reading the longest lexeme is always right.

llguidance reads a lexeme as long as it can and never looks back: ``[a-z]+`` before ``"x"`` would
swallow the x. So what is regular is joined into lexemes as large as can be, and a lexeme that could
be read on where another must begin is spelled out by its characters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from ..protocol.errors import GrammarError
from .automaton import DEAD, ByteAutomaton, TooLarge, build
from .checks_grammar import ROOT, refs, settle
from .gbnf import Alt, Expr, Ref, Rep, Rules, Seq
from .regex_tree import (
    NOTHING,
    Chars,
    Repeat,
    Sequence,
    Tree,
    Union,
    portable,
    repeat,
    sequence,
    union,
)

MAX_SIZE = 50_000
"""Characters of all lexemes with their repeats written out."""


@dataclass(frozen=True)
class Lexeme:
    """A regular language without the empty text, read as one."""

    tree: Tree

    @cached_property
    def automaton(self) -> ByteAutomaton:
        try:
            return build(self.tree)
        except TooLarge as error:
            raise GrammarError(f"the grammar is too complex: {error}") from None


Node = Lexeme | Ref | Seq | Alt | Rep


def regular_rules(rules: Rules) -> dict[str, Tree]:
    """The rules that never lead back to themselves, as trees. Raises `GrammarError` for ones that
    are too large when written out."""
    trees: dict[str, Tree] = {}

    def regular(name: str, _: set[str]) -> bool:
        if not all(other in trees for other in refs(rules[name])):
            return False
        trees[name] = tree_of(rules[name], trees)
        if trees[name].size > MAX_SIZE:
            raise GrammarError(
                f"the grammar is too large: over {MAX_SIZE} characters written out",
                where=f"rule {name[:60]}",
            )
        return True

    settle(rules, regular)
    return trees


def tree_of(expr: Expr, trees: dict[str, Tree]) -> Tree:
    """An expression all of whose rules are regular."""
    if isinstance(expr, Ref):
        return trees[expr.name]
    if isinstance(expr, Seq):
        return sequence([tree_of(part, trees) for part in expr.parts])
    if isinstance(expr, Alt):
        return union([tree_of(part, trees) for part in expr.parts])
    if isinstance(expr, Rep):
        return repeat(tree_of(expr.body, trees), expr.low, expr.high)
    return expr


def rules_over_lexemes(rules: Rules, trees: dict[str, Tree]) -> dict[str, Node]:
    """The rules that are not regular, over lexemes that may be read greedily."""
    spelled: set[Tree] = set()
    while True:
        cut = _Cutter(trees, spelled)
        nodes = {name: cut.node(expr) for name, expr in rules.items() if name not in trees}
        clashing = _clashes(nodes)
        if not clashing:
            return nodes
        spelled |= clashing


class _Cutter:
    def __init__(self, trees: dict[str, Tree], spelled: set[Tree]) -> None:
        self._trees = trees
        self._spelled = spelled

    def node(self, expr: Expr) -> Node:
        if self._regular(expr):
            return self._lexeme(tree_of(expr, self._trees))
        if isinstance(expr, Rep):
            return Rep(self.node(expr.body), expr.low, expr.high)  # type: ignore[arg-type]
        if isinstance(expr, Seq):
            return Seq(tuple(self._joined(expr.parts, sequence)))  # type: ignore[arg-type]
        if isinstance(expr, Alt):
            ordered = sorted(expr.parts, key=lambda part: not self._regular(part))
            return Alt(tuple(self._joined(tuple(ordered), union)))  # type: ignore[arg-type]
        assert isinstance(expr, Ref)
        return expr

    def _joined(self, parts: tuple[Expr, ...], join: Callable[[list[Tree]], Tree]) -> list[Node]:
        """Regular parts beside each other become one lexeme."""
        found: list[Node] = []
        run: list[Tree] = []
        for part in (*parts, None):
            if part is not None and self._regular(part):
                run.append(tree_of(part, self._trees))
                continue
            if run:
                found.append(self._lexeme(join(run)))
                run = []
            if part is not None:
                found.append(self.node(part))
        return found

    def _regular(self, expr: Expr) -> bool:
        return all(name in self._trees for name in refs(expr))

    def _lexeme(self, tree: Tree) -> Node:
        full = without_empty(tree)
        if full == NOTHING:
            return Seq(())
        if full in self._spelled:
            node = self._characters(full)
        else:
            node = Lexeme(full)
        return Alt((node, Seq(()))) if nullable(tree) else node  # type: ignore[arg-type]

    def _characters(self, tree: Tree) -> Node:
        if isinstance(tree, Chars):
            return Lexeme(tree)
        if isinstance(tree, Repeat):
            return Rep(self._characters(tree.body), tree.low, tree.high)  # type: ignore[arg-type]
        parts = tuple(self._characters(part) for part in tree.parts)
        return (Seq if isinstance(tree, Sequence) else Alt)(parts)  # type: ignore[arg-type]


def nullable(tree: Tree) -> bool:
    """Whether the empty text is in the language."""
    if isinstance(tree, Chars):
        return False
    if isinstance(tree, Repeat):
        return tree.low == 0 or nullable(tree.body)
    return (all if isinstance(tree, Sequence) else any)(map(nullable, tree.parts))


def without_empty(tree: Tree) -> Tree:
    """The same language but for the empty text."""
    if not nullable(tree):
        return tree
    if isinstance(tree, Union):
        return union([without_empty(part) for part in tree.parts])
    if isinstance(tree, Repeat):
        body = without_empty(tree.body)
        high = None if tree.high is None else tree.high - 1
        return sequence([body, repeat(body, 0, high)])
    assert isinstance(tree, Sequence)
    options = [
        sequence([without_empty(part), *tree.parts[i + 1 :]]) for i, part in enumerate(tree.parts)
    ]
    return union(options) if options else NOTHING


# --- which lexemes clash --------------------------------------------------------------------------


def _clashes(nodes: dict[str, Node]) -> set[Tree]:
    """Lexemes of which one may be read on past where the other ends and something follows it."""
    follow = _Follow(nodes)
    found: set[Tree] = set()
    for lexeme, after in follow.of.items():
        starts = {byte for other in after for byte in other.automaton.next_bytes(0)}
        for other in follow.of:
            both_one = isinstance(lexeme.tree, Chars) and isinstance(other.tree, Chars)
            if not both_one and _reads_on(lexeme.automaton, other.automaton, starts):
                found |= {t for t in (lexeme.tree, other.tree) if not isinstance(t, Chars)}
    return found


def _reads_on(ended: ByteAutomaton, other: ByteAutomaton, starts: set[int]) -> bool:
    """Whether a text of ``ended`` is the beginning of a longer one of ``other`` that goes on with a
    byte of ``starts``."""
    pairs = list({(ended.classes[b], other.classes[b]): b for b in range(256)}.values())
    seen = {(0, 0)}
    todo = [(0, 0)]
    while todo:
        mine, theirs = todo.pop()
        if ended.is_final(mine) and any(other.next(theirs, b) != DEAD for b in starts):
            return True
        for byte in pairs:
            step = (ended.next(mine, byte), other.next(theirs, byte))
            if DEAD not in step and step not in seen:
                seen.add(step)
                todo.append(step)
    return False


class _Follow:
    """Which lexemes may come right after each."""

    def __init__(self, nodes: dict[str, Node]) -> None:
        self._nodes = nodes
        self._first: dict[str, frozenset[Lexeme]] = dict.fromkeys(nodes, frozenset())
        self._empty: dict[str, bool] = dict.fromkeys(nodes, False)
        self._after: dict[str, frozenset[Lexeme]] = dict.fromkeys(nodes, frozenset())
        self.of: dict[Lexeme, frozenset[Lexeme]] = {}
        while self._learn_first():
            pass
        while self._learn_after():
            pass

    def _learn_first(self) -> bool:
        changed = False
        for name, node in self._nodes.items():
            first, empty = self._begins(node)
            if first != self._first[name] or empty != self._empty[name]:
                self._first[name], self._empty[name] = first, empty
                changed = True
        return changed

    def _begins(self, node: Node) -> tuple[frozenset[Lexeme], bool]:
        """(lexemes it may begin with, whether it may be empty)"""
        if isinstance(node, Lexeme):
            return frozenset((node,)), False
        if isinstance(node, Ref):
            return self._first[node.name], self._empty[node.name]
        if isinstance(node, Rep):
            first, empty = self._begins(node.body)  # type: ignore[arg-type]
            return first, empty or node.low == 0
        found: frozenset[Lexeme] = frozenset()
        if isinstance(node, Alt):
            both = [self._begins(part) for part in node.parts]  # type: ignore[arg-type]
            return found.union(*(f for f, _ in both)), any(e for _, e in both)
        for part in node.parts:
            first, empty = self._begins(part)  # type: ignore[arg-type]
            found |= first
            if not empty:
                return found, False
        return found, True

    def _learn_after(self) -> bool:
        before = (dict(self._after), dict(self.of))
        for name, node in self._nodes.items():
            self._spread(node, self._after[name])
        return before != (self._after, self.of)

    def _spread(self, node: Node, after: frozenset[Lexeme]) -> None:
        if isinstance(node, Lexeme):
            self.of[node] = self.of.get(node, frozenset()) | after
        elif isinstance(node, Ref):
            self._after[node.name] |= after
        elif isinstance(node, Alt):
            for part in node.parts:
                self._spread(part, after)  # type: ignore[arg-type]
        elif isinstance(node, Rep):
            again = node.high is None or node.high > 1
            first, _ = self._begins(node.body)  # type: ignore[arg-type]
            self._spread(node.body, after | first if again else after)  # type: ignore[arg-type]
        else:
            for part in reversed(node.parts):
                self._spread(part, after)  # type: ignore[arg-type]
                first, empty = self._begins(part)  # type: ignore[arg-type]
                after = first | after if empty else first


# --- as Lark --------------------------------------------------------------------------------------


def lark_of(nodes: dict[str, Node]) -> str:
    """llguidance's dialect of Lark; lexemes are T0, T1, …, rules r0, r1, …"""
    names = {name: f"r{i}" for i, name in enumerate(nodes)}
    lexemes: dict[Tree, str] = {}

    def spell(node: Node) -> str:
        if isinstance(node, Lexeme):
            return lexemes.setdefault(node.tree, f"T{len(lexemes)}")
        if isinstance(node, Ref):
            return names[node.name]
        if isinstance(node, Rep):
            high = "" if node.high is None else node.high
            return f"({spell(node.body)}){{{node.low},{high}}}"  # type: ignore[arg-type]
        if not node.parts:
            return '""'
        sign = " | " if isinstance(node, Alt) else " "
        return "(" + sign.join(spell(part) for part in node.parts) + ")"  # type: ignore[arg-type]

    lines = [f"start: {names[ROOT]}"]
    lines += [f"{names[name]}: {spell(node)}" for name, node in nodes.items()]
    lines += [f"{name}: /{portable(tree)}/" for tree, name in lexemes.items()]
    return "\n".join(lines) + "\n"
