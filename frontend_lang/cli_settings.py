"""The engine's settings as command-line flags, made from the fields of `EngineConfig`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import typer
from ramet.runtime.config import KEY_VARIABLES, REPEATED, EngineConfig, Setting, settings
from ramet.runtime.config_names import ABSENT, ALIASES
from ramet.runtime.protocol import BadInputError

from .backends import embedded

_SPELLINGS = "Common spellings of other engines work too: --model, --max-model-len, --seed, …"
_ON_FLAGS = {"enable_prefix_caching": "--disable-radix-cache"}
_MOST_METAVAR = 40
"""Characters; a longer list of choices is part of the help's text, where lines can break."""
OF_SERVERS = (*embedded.OF_SERVERS, "api_key", "api_key_file", "admin_key", "restart_engine")
"""Settings that mean nothing to a runtime which serves nobody else."""

Command = Callable[..., None]


def with_settings(leave_out: Iterable[str] = ()) -> Callable[[Command], Command]:
    """Give a command one flag a setting; it gets them in a last parameter named ``settings``, as a
    dict of those that differ from their defaults."""
    wanted = [setting for setting in settings() if setting.name not in set(leave_out)]

    def decorate(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True).parameters.values()
        own_names = [parameter.name for parameter in own if parameter.name != "settings"]

        def run(**values: Any) -> None:
            given = {
                setting.name: value
                for setting in wanted
                if (value := _given(setting, values[setting.name])) != setting.default
            }
            command(**{name: values[name] for name in own_names}, settings=given)

        parameters = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in own
            if parameter.name != "settings"
        ] + [_flag(setting) for setting in wanted]
        run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__doc__ = f"{inspect.getdoc(command)}\n\n{_SPELLINGS}"
        run.__name__ = command.__name__
        return run

    return decorate


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, or a usage error that names the flag which is wrong."""
    try:
        EngineConfig.from_settings(given)
    except BadInputError as error:
        raise typer.BadParameter(str(error)) from None
    return dict(given)


def with_model(given: Mapping[str, Any], model: str | None) -> dict[str, Any]:
    """Add a model named as an argument to the flags; naming two is a usage error."""
    if model is None:
        return checked(given)
    if given.get("model_path", model) != model:
        raise typer.BadParameter(f"two models are named: {model} and {given['model_path']}")
    return checked({**given, "model_path": model})


def translated(arguments: Iterable[str]) -> list[str]:
    """Command-line arguments with other engines' spellings of flags replaced by ours. A flag whose
    feature is missing is a usage error that names the feature."""
    ours: list[str] = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        name = flag.removeprefix("--").replace("-", "_") if flag.startswith("--") else ""
        negated = name.removeprefix("no_")
        if name in ABSENT:
            raise typer.BadParameter(f"{flag}: not supported: {ABSENT[name]}")
        if name != negated and negated in _ON_FLAGS:
            ours.append(_ON_FLAGS[negated])
        elif name in ALIASES and name not in _ON_FLAGS:
            ours.append(f"--{ALIASES[name].replace('_', '-')}{equals}{value}")
        elif name not in _ON_FLAGS:  # what is on by default needs no flag
            ours.append(argument)
    return ours


def _given(setting: Setting, value: Any) -> Any:
    """A flag's value; of one that may be given several times, all of them as one."""
    if setting.name not in REPEATED or value is None:
        return value
    return REPEATED[setting.name].join(value) or None


def _flag(setting: Setting) -> inspect.Parameter:
    kind: Any = setting.type | None if setting.optional else setting.type
    if setting.name in REPEATED:
        kind = list[str] | None
    variables = [KEY_VARIABLES[setting.name]] if setting.name in KEY_VARIABLES else []
    if setting.name == "api_key":
        variables.append(f"{variables[0]}S")
    choices, text = "|".join(setting.choices), setting.help
    if len(choices) > _MOST_METAVAR:
        choices, text = "NAME", f"{text} One of {', '.join(setting.choices)}."
    option = typer.Option(
        f"--{setting.name.replace('_', '-')}",
        help=text,
        metavar=choices or None,
        show_default="off" if setting.default is False else True,
        envvar=variables or None,
    )
    return inspect.Parameter(
        setting.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=setting.default,
        annotation=Annotated[kind, option],
    )
