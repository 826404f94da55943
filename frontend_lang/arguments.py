"""What a program is called with: the function's own arguments, and sampling parameters."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ramet.runtime.protocol import BadInputError, sampling_from
from ramet.runtime.protocol.sampling import ALIASES, FIELDS

from .names import near

SAMPLING = (FIELDS | frozenset(ALIASES)) - {"constraint"}
OF_RUNS = ("backend", "stream", "timeout", "cache_salt")
"""Keywords of a run beside the function's arguments and the sampling parameters."""
OF_BATCHES = ("backend", "progress_bar", "generator_style", "num_threads", "timeout", "cache_salt")

Arguments = dict[str, Any]
Item = tuple[Arguments, dict[str, Any]]
"""Arguments by parameter, and sampling parameters."""
Given = Mapping[str, Any] | Sequence[Any]
"""One set of arguments of a batch: by name, or in order."""


class ArgumentsError(BadInputError, TypeError):
    """Arguments do not match the function's signature."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """A function's parameters but for the state; those in ``bound`` have their values."""

    name: str
    signature: inspect.Signature
    bound: Mapping[str, Any]

    @property
    def sampling_names(self) -> frozenset[str]:
        """Keywords of a run that are sampling parameters: the function's own names win."""
        return SAMPLING - self.signature.parameters.keys()

    def split(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Item:
        """(arguments by parameter, sampling) of a call. Raises `BadInputError` for either."""
        sampling = {k: v for k, v in kwargs.items() if k in self.sampling_names}
        own = {k: v for k, v in kwargs.items() if k not in sampling}
        return self.arguments(args, own), checked_sampling(sampling, "run()")

    def arguments(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], label: str = ""
    ) -> Arguments:
        """Arguments by parameter, the bound ones among them."""
        names = [n for n in self.signature.parameters if n not in self.bound]
        if self.bound and args:  # positions count over what is not bound
            kwargs = {**dict(zip(names, args)), **kwargs}
            if len(args) > len(names):
                raise self._mismatch(label, "too many positional arguments")
            args = ()
        try:
            given = self.signature.bind(*args, **{**self.bound, **kwargs})
        except TypeError as error:
            raise self._mismatch(label, self._why(error, kwargs, label)) from None
        out = {**given.arguments}
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD and name in out:
                out.update(out.pop(name))
            elif parameter.kind in (
                inspect.Parameter.VAR_POSITIONAL,
                inspect.Parameter.POSITIONAL_ONLY,
            ):
                raise self._mismatch(label, f"parameter {name!r} must be usable as a keyword")
        return out

    def items(
        self,
        batch_arguments: Sequence[Given],
        sampling: Mapping[str, Any],
    ) -> list[Item]:
        """The batch as (arguments, sampling) pairs."""
        given = checked_sampling(sampling, "run_batch()")
        out: list[Item] = []
        for index, item in enumerate(batch_arguments):
            label = f"item {index} of the batch: "
            if isinstance(item, Mapping):
                arguments = self.arguments((), item, label)
            elif isinstance(item, (tuple, list)):
                arguments = self.arguments(item, {}, label)
            else:
                raise self._mismatch(label, f"a dict or a tuple is needed, not {item!r}")
            out.append((arguments, given))
        return out

    def check_known(self, names: Iterable[str]) -> None:
        """Raise `ArgumentsError` for the first name that the function has no parameter for."""
        kinds = [p.kind for p in self.signature.parameters.values()]
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            for name in names:
                if name not in self.signature.parameters:
                    hint = near(name, self.signature.parameters)
                    raise ArgumentsError(f"{self.name} has no parameter {name!r}{hint}", param=name)

    def _why(self, error: TypeError, given: Mapping[str, Any], label: str) -> str:
        """What binding the arguments failed for, and the first name that is no parameter: it may
        be a misspelt one of those that are missing."""
        unknown = next((name for name in given if name not in self.signature.parameters), None)
        kinds = [p.kind for p in self.signature.parameters.values()]
        if unknown is None or inspect.Parameter.VAR_KEYWORD in kinds:
            return str(error)
        known = [*self.signature.parameters]
        if not label:  # of a run itself, not of an item of its batch
            known += [*self.sampling_names, *OF_RUNS]
        why, hint = str(error), near(unknown, known)
        if repr(unknown) in why:
            return f"{why}{hint}"
        return f"{why}, and got an unexpected keyword argument {unknown!r}{hint}"

    def _mismatch(self, label: str, why: str) -> ArgumentsError:
        return ArgumentsError(
            f"{label}given arguments mismatch the signature of {self.name}{self.signature}: {why}"
        )


def checked_sampling(sampling: Mapping[str, Any], call: str) -> dict[str, Any]:
    """What is set of a call's sampling parameters. Raises `BadInputError` for a bad one."""
    for name in sampling:
        if name not in SAMPLING:
            raise unexpected(call, name, (*SAMPLING, *OF_BATCHES))
    sampling_from(sampling)
    return {name: value for name, value in sampling.items() if value is not None}


def unexpected(call: str, name: str, known: Iterable[str], where: str = "") -> ArgumentsError:
    """The error for a keyword that a call does not take."""
    what = f"{call} got an unexpected keyword argument {name!r}{near(name, known)}"
    return ArgumentsError(what, param=name, where=where or None)
