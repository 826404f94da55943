"""What the language knows of one stream of a program: its names, its open role, its ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .constraints import ValueType


@dataclass(slots=True)
class Made:
    """A variable that instruction ``op`` of ``branch`` makes when it runs."""

    op: int
    branch: Branch
    name: str | None
    type: ValueType | None = None
    streams: bool = False
    """Whether its text comes in deltas (a generation's, of its first sample, or a selection's; not
    a scope's or a gathered list's)."""
    many: bool = False
    """Whether its value is a list (n > 1, or gathered)."""
    gathered: bool = False
    """Whether that is a list that a join made in a block."""


@dataclass(slots=True)
class Given:
    """A variable that Python set; ``op`` is the `Bind` that tells the runtime."""

    value: Any
    op: int
    branch: Branch


@dataclass(slots=True)
class Gathered:
    """A variable that `join` gathered: one entry a child, None where the child has no such name."""

    items: list[Binding | None]
    op: int
    branch: Branch


Binding = Made | Given | Gathered
Names = dict[str | None, Binding]


@dataclass(slots=True, eq=False)
class Branch:
    """A stream, as recorded so far. ``path`` tells which child of which child of the root it is."""

    stream: int
    path: tuple[int, ...] = ()
    parent: Branch | None = None
    fork_op: int = -1
    names: Names = field(default_factory=lambda: Names())
    role: str | None = None
    uses_roles: bool = False
    ended: bool = False
    last_op: int = -1
    start_op: int = -1
    text_op: int = -1
    messages_op: int = -1
    children: int = 0
    in_block: bool = False
    """Whether it was forked in an arm or a loop of a program that is traced."""

    def child(self, stream: int, op: int) -> Branch:
        """A new branch that starts as a copy of this one."""
        path = (*self.path, self.children)
        self.children += 1
        return Branch(
            stream,
            path,
            self,
            op,
            dict(self.names),
            self.role,
            self.uses_roles,
            last_op=op,
        )

    def lineage(self, op: int) -> list[tuple[int, int]]:
        """(stream, op) pairs: what must not have failed before ``op`` of this branch can run."""
        pairs = [(self.stream, op)]
        branch = self
        while branch.parent is not None:
            pairs.append((branch.parent.stream, branch.fork_op))
            branch = branch.parent
        return pairs

    def known(self, but: str | None = None) -> str:
        """The names that can be read, for an error message."""
        names = [name for name in list(self.names) if name is not None and name != but]
        return ", ".join(names) if names else "none"
