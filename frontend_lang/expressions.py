"""What a program appends to its state: text, generations, selections and chat messages.

Expressions are plain values; nothing runs until one is appended to a state. Arguments are checked
here, at the call, so that an error points at the line that made it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Never, cast

from ramet.runtime.protocol import BadInputError, sampling_from

from .arguments import unexpected
from .choices import METHODS, ChoicesMethod, token_length_normalized
from .constraints import ValueType, check_alone, constraint_of
from .source import here


class Expression:
    """Anything but a string that can be appended to a state. ``+`` concatenates."""

    __slots__ = ("line",)

    def __init__(self) -> None:
        self.line = here()

    def __add__(self, other: Expression | str) -> Concat:
        return Concat((self, checked(other)))

    def __radd__(self, other: Expression | str) -> Concat:
        return Concat((checked(other), self))


class Concat(Expression):
    """Several expressions, one after the other."""

    __slots__ = ("items",)

    def __init__(self, items: Sequence[Expression | str]) -> None:
        super().__init__()
        flat: list[Expression | str] = []
        for item in items:
            flat.extend(item.items if isinstance(item, Concat) else (item,))
        self.items = tuple(flat)

    def __repr__(self) -> str:
        return " + ".join(repr(item) for item in self.items)


class GenExpression(Expression):
    """One generation. ``sampling`` holds only what was given; the rest comes from the run."""

    __slots__ = ("name", "sampling", "type")

    def __init__(self, name: str | None, sampling: dict[str, Any], type_: ValueType | None) -> None:
        super().__init__()
        self.name = name
        self.sampling = sampling
        self.type = type_

    def __repr__(self) -> str:
        return f"gen({self.name!r})"


class SelectExpression(Expression):
    """A choice between texts by their log-probs."""

    __slots__ = ("boundary", "choices", "explain", "method", "name")

    def __init__(
        self,
        name: str | None,
        choices: tuple[str, ...],
        method: ChoicesMethod,
        boundary: Literal["exact", "plain"],
        explain: bool | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.choices = choices
        self.method: ChoicesMethod = method
        self.boundary: Literal["exact", "plain"] = boundary
        self.explain = explain

    def __repr__(self) -> str:
        return f"select({self.name!r}, {list(self.choices)!r})"


class RoleExpression(Expression):
    """A chat message (``body`` given), or one of its two ends."""

    __slots__ = ("body", "part", "role")

    def __init__(
        self, role: str, part: Literal["all", "begin", "end"], body: Expression | str | None = None
    ) -> None:
        super().__init__()
        self.role = role
        self.part = part
        self.body = body

    def __repr__(self) -> str:
        body = repr(self.body) if self.part == "all" else ""
        suffix = "" if self.part == "all" else f"_{self.part}"
        return f"{self.role}{suffix}({body})"


def checked(value: object) -> Expression | str:
    """The value itself if it can be appended; `BadInputError` naming the line otherwise."""
    if isinstance(value, (str, Expression)):
        return value
    if value is None:
        raise BadInputError("None cannot be appended to a program", where=here() or None)
    kind = type(value).__name__  # pyright: ignore[reportUnknownArgumentType]
    hint = "; join it into a string first" if kind in ("list", "tuple") else ""
    raise BadInputError(
        f"cannot append a {kind} to a program: only strings and expressions{hint}",
        where=here() or None,
    )


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    repetition_penalty: float | None = None,
    ignore_eos: bool | None = None,
    seed: int | None = None,
    logit_bias: dict[int, float] | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: Any = None,
    choices: Sequence[str] | None = None,
    choices_method: ChoicesMethod | None = None,
    constrained: bool = False,
    regex: str | None = None,
    json_schema: Any = None,
    grammar: str | None = None,
    whitespace: Literal["compact", "flexible"] | None = None,
    jump_forward: bool | None = None,
    heal: bool | None = None,
    explain: bool | None = None,
    **unknown: Never,
) -> Expression:
    """Generate text, append it and bind it to ``name``.

    What is left out comes from the run, and from the runtime's defaults after that;
    ``max_tokens`` then is what the context leaves, 1,024 at most. With ``choices`` the result is a
    `select` that scores them, unless ``constrained`` asks for generation that can only produce one
    of them. ``return_text_in_logprobs`` is accepted for SGLang's sake: text is always there.

    At most one of these says what the text must match; ``s.value(name)`` then is the typed value.
    ``dtype``: int, float, bool, str, a ``Literal``, an enum, or a type that has a JSON schema.
    ``json_schema``: a dict, JSON text, or a pydantic model, TypedDict or dataclass. ``regex``: a
    pattern for the whole text. ``grammar``: EBNF, as GBNF or Lark write it. ``whitespace``: none
    between the tokens of JSON (compact, the default), or a little, as pretty output has it
    (flexible). ``jump_forward=False`` samples also the tokens that are forced.

    ``heal=True``: the last tokens of the literal before this may be cut otherwise, together with
    what is generated: after "http:" the token "://" can come.

    ``explain=True``: ``s.get_meta_info(name)["explain"]`` says where the prompt left what was
    cached; given to a run, for all its generations and selections.

    Raises `BadInputError` naming the parameter and the line, `GrammarError` for a bad constraint.
    """
    del return_text_in_logprobs
    _check_known(gen, unknown)
    if name is not None:
        check_name(name)
    if choices is not None and not constrained:
        check_alone(
            choices=choices, dtype=dtype, regex=regex, json_schema=json_schema, grammar=grammar
        )
        if heal:
            raise BadInputError(
                "heal is for what is generated; choices are scored over an exact boundary as it is",
                param="heal",
                where=here() or None,
            )
        method = token_length_normalized if choices_method is None else choices_method
        return select(name, choices, choices_method=method, explain=explain)
    if choices is None and (constrained or choices_method is not None):
        what = "constrained=True" if constrained else "choices_method"
        raise BadInputError(f"{what} needs choices", param="choices", where=here() or None)
    if choices is not None:
        choices = _check_choices(choices)
    kind, constraint, stops = constraint_of(
        dtype=dtype,
        regex=regex,
        json_schema=json_schema,
        grammar=grammar,
        choices=choices,
        whitespace=whitespace,
    )
    given: dict[str, Any] = {
        "max_new_tokens": max_tokens,
        "min_new_tokens": min_tokens,
        "n": n,
        "stop": _stops(stop, stops),
        "stop_token_ids": _ids(stop_token_ids),
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
        "repetition_penalty": repetition_penalty,
        "ignore_eos": ignore_eos,
        "seed": seed,
        "logit_bias": logit_bias,
        "return_logprob": return_logprob,
        "logprob_start_len": logprob_start_len,
        "top_logprobs_num": top_logprobs_num,
        "constraint": constraint,
        "jump_forward": jump_forward,
        "heal": heal,
        "explain": explain,
    }
    sampling = {key: value for key, value in given.items() if value is not None}
    check_sampling(sampling)
    return GenExpression(name, sampling, kind)


def gen_int(name: str | None = None, max_tokens: int | None = None, **sampling: Any) -> Expression:
    """`gen` of an integer: ``dtype=int``; read it typed with ``s.value(name)``."""
    return gen(name, max_tokens, **_no_dtype("gen_int", sampling), dtype=int)


def gen_string(
    name: str | None = None, max_tokens: int | None = None, **sampling: Any
) -> Expression:
    """`gen` of a quoted string: ``dtype=str``; read it typed with ``s.value(name)``."""
    return gen(name, max_tokens, **_no_dtype("gen_string", sampling), dtype=str)


def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesMethod = token_length_normalized,
    boundary: Literal["exact", "plain"] = "exact",
    explain: bool | None = None,
    **unknown: Never,
) -> Expression:
    """Score ``choices`` as continuations of the text so far, append the best, bind it to ``name``.

    ``explain=True``: as for `gen`, of the text before the choices.

    Raises `BadInputError` (a ValueError) for no choices, a temperature, or an unknown method.
    """
    _check_known(select, unknown)
    if name is not None:
        check_name(name)
    texts = _check_choices(choices)
    if temperature > 1e-5:
        raise BadInputError(
            f"select takes the best choice: temperature must be 0, not {temperature!r}",
            param="temperature",
            where=here() or None,
        )
    if choices_method not in METHODS:
        raise BadInputError(
            f"choices_method must be one of {', '.join(sorted(METHODS))}, not {choices_method!r}",
            param="choices_method",
            where=here() or None,
        )
    if boundary not in ("exact", "plain"):
        raise BadInputError(
            f"boundary must be 'exact' or 'plain', not {boundary!r}",
            param="boundary",
            where=here() or None,
        )
    if explain is not None:
        check_sampling({"explain": explain})
    return SelectExpression(name, texts, choices_method, boundary, explain)


def check_sampling(sampling: dict[str, Any]) -> None:
    """Raise `BadInputError` with the user's line for a bad parameter."""
    try:
        sampling_from(sampling)
    except BadInputError as error:
        raise BadInputError(error.message, param=error.param, where=here() or None) from None


def check_name(name: object) -> None:
    """Raises `BadInputError` for what no variable can be called."""
    if not isinstance(name, str):
        raise BadInputError(
            f"a variable's name must be a string, not {name!r}", param="name", where=here() or None
        )


def _check_known(call: Callable[..., Expression], unknown: Mapping[str, object]) -> None:
    """Raise `ArgumentsError`, also a TypeError, for the first argument that the call has not."""
    for name in unknown:
        known = list(inspect.signature(call).parameters)[:-1]
        raise unexpected(f"{call.__name__}()", name, known, here())


def _check_choices(choices: object) -> tuple[str, ...]:
    where = here() or None
    if choices is None or isinstance(choices, str) or not isinstance(choices, Sequence):
        raise BadInputError(
            f"choices must be a list of strings, not {choices!r}",
            param="choices",
            where=where,
        )
    texts: list[str] = []
    for choice in cast("Sequence[object]", choices):
        if not isinstance(choice, str):
            raise BadInputError(
                f"choices must be strings, not {choice!r}", param="choices", where=where
            )
        texts.append(choice)
    if not texts:
        raise BadInputError("choices must not be empty", param="choices", where=where)
    return tuple(texts)


def _stops(given: str | Sequence[str] | None, own: tuple[str, ...]) -> Any:
    if not own:
        return given
    if given is None:
        return own
    return (*((given,) if isinstance(given, str) else given), *own)


def _ids(given: object) -> Any:
    return given if given is None or isinstance(given, (int, str)) else tuple(cast("Any", given))


def _no_dtype(name: str, sampling: dict[str, Any]) -> dict[str, Any]:
    if "dtype" in sampling:
        raise TypeError(f"{name}() got an unexpected keyword argument 'dtype'")
    return sampling
