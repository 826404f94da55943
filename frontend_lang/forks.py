"""A group of branches, as `fork` returns it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Literal, TypeVar, cast

from ramet.runtime.protocol import BadInputError

from .expressions import Expression
from .source import here

S = TypeVar("S")


class Forks(Generic[S]):
    """Branches by index. ``forks += x`` appends to each: one expression for all, a list with one a
    branch, or a function of the branch's index. ``with s.fork(n) as forks`` joins at the end."""

    __slots__ = ("_join", "states")

    def __init__(self, states: list[S], join: Callable[[list[S], str], None]) -> None:
        self.states = states
        self._join = join

    def join(
        self, mode: Literal["gather_variable", "concate_and_append"] = "gather_variable"
    ) -> None:
        """End the branches. ``gather_variable``: each variable that is new in a branch becomes a
        list in the parent, one entry a branch, None where a branch has none.
        ``concate_and_append``: the branches' new texts are appended to the parent in order."""
        self._join(self.states, mode)

    def __getitem__(self, index: int) -> S:
        return self.states[index]

    def __setitem__(self, index: int, state: S) -> None:
        """``forks[i] += x`` assigns back; nothing else may be assigned."""
        if state is not self.states[index]:
            raise BadInputError("a branch of a fork cannot be replaced", where=here() or None)

    def __iter__(self) -> Iterator[S]:
        return iter(self.states)

    def __len__(self) -> int:
        return len(self.states)

    def __iadd__(
        self,
        other: Expression | str | Sequence[Expression | str] | Callable[[int], Expression | str],
    ) -> Forks[S]:
        if isinstance(other, (str, Expression)):
            items: list[Any] = [other] * len(self.states)
        elif callable(other):
            items = [other(index) for index in range(len(self.states))]
        else:
            items = list(cast("Sequence[Any]", other))
            if len(items) != len(self.states):
                raise BadInputError(
                    f"{len(items)} expressions for {len(self.states)} branches",
                    where=here() or None,
                )
        for state, item in zip(self.states, items):
            state.__iadd__(item)  # pyright: ignore
        return self

    def __enter__(self) -> Forks[S]:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self.join()
