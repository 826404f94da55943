"""``ramet run FILE.py[:function]``: a program of a file, its text as it comes, its variables."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from ramet.runtime.protocol import BadInputError
from rich.console import Console
from rich.table import Table

from .cli_serve import say_log, say_stage
from .cli_settings import OF_SERVERS, with_model, with_settings

if TYPE_CHECKING:
    from .arguments import Parameters
    from .function import Function
    from .state import State

_SCHEMES = ("tcp://", "ipc://", "http://", "https://")
_SIMPLE: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "bool": lambda text: {"true": True, "false": False}[text.lower()],
}
"""Annotations that a text is converted by."""
_Setup = Annotated[bool, typer.Option("--verbose", help="Show the stages of start-up.")]


@with_settings(leave_out=(*OF_SERVERS, "model_path"))
def run(
    file: Annotated[str, typer.Argument(metavar="FILE.py[:function]", show_default=False)],
    arg: Annotated[
        list[str] | None,
        typer.Option(
            "--arg",
            metavar="NAME=TEXT",
            help="An argument of the function: a text, or what its annotation says (int, float, "
            "bool); NAME:=JSON for data.",
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option("--backend", metavar="URL", help="Run at tcp://… or http://… instead."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", help="Key for --backend.", envvar="RAMET_API_KEY")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model-path", "--model", help="Model to run it with.")
    ] = None,
    verbose: _Setup = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Run a program of a Python file, print its text as it comes and its variables at the end."""
    function = find_function(file)
    arguments = _arguments(function, arg or ())
    with open_backend(backend, api_key, with_model(settings, model), verbose) as runtime:
        state = function.run(**arguments, backend=runtime, stream=True)
        for piece in state.text_iter():
            sys.stdout.write(piece)
            sys.stdout.flush()
        print()
        error = state.error()
        if error is not None:
            raise error
        _print_variables(state)


def open_backend(
    url: str | None, api_key: str | None, settings: dict[str, Any], verbose: bool
) -> Any:
    """A server that runs already, or an embedded runtime: a context manager either way."""
    if url is not None and settings:
        raise typer.BadParameter(
            f"--backend runs with its own settings; not with {', '.join(settings)}"
        )
    from . import Runtime, RuntimeEndpoint

    if url is not None:
        if not url.lower().startswith(_SCHEMES):
            raise typer.BadParameter(
                f"--backend {url!r} is no endpoint: tcp://host:port, ipc://path or http://host:port"
            )
        return RuntimeEndpoint(url, api_key=api_key)
    if verbose:
        return Runtime(**settings, on_progress=say_stage, on_log=say_log)
    return Runtime(**settings)


def find_function(target: str) -> Function:
    """The program of ``FILE.py[:function]``. Raises usage errors, and what the file raises."""
    path, _, name = target.rpartition(":") if ":" in target else (target, "", "")
    return _pick(_load(Path(path)), name, path)


def _load(path: Path) -> ModuleType:
    if not path.is_file():
        raise typer.BadParameter(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise typer.BadParameter(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module


def _pick(module: ModuleType, name: str, path: str) -> Function:
    from .function import Function

    programs = {key: value for key, value in vars(module).items() if isinstance(value, Function)}
    known = ", ".join(programs)
    if name:
        if name not in programs:
            raise typer.BadParameter(f"{path} has no program {name}; it has: {known or 'none'}")
        return programs[name]
    if "main" in programs:
        return programs["main"]
    if len(programs) != 1:
        raise typer.BadParameter(
            f"{path} has several programs: name one as {path}:NAME ({known})"
            if programs
            else f"{path} has no function with @ramet.function"
        )
    return next(iter(programs.values()))


def _arguments(function: Function, given: Iterable[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    parameters = function.parameters
    for item in given:
        key, equals, text = item.partition("=")
        name = key.removesuffix(":")
        if not equals or not name.isidentifier():
            raise typer.BadParameter(f"--arg {item!r}: NAME=TEXT or NAME:=JSON is expected")
        try:
            values[name] = json.loads(text) if key != name else _converted(parameters, name, text)
        except ValueError as error:
            raise typer.BadParameter(f"--arg {item!r}: {error}") from None
    try:
        parameters.check_known(values)
        return parameters.arguments((), values)
    except BadInputError as error:
        raise typer.BadParameter(str(error)) from None


def _converted(parameters: Parameters, name: str, text: str) -> Any:
    """The text as the parameter's annotation says, which may itself be a text. Raises
    `ValueError`."""
    parameter = parameters.signature.parameters.get(name)
    kind: Any = None if parameter is None else parameter.annotation
    kind = kind.__name__ if isinstance(kind, type) else str(kind)
    convert = _SIMPLE.get(kind.removesuffix(" | None"))
    try:
        return text if convert is None else convert(text)
    except (KeyError, ValueError):
        raise ValueError(f"{name} is annotated as {kind}; {name}:=JSON gives other data") from None


def _print_variables(state: State) -> None:
    values = {name: state[name] for name in state._branch.names if name}  # pyright: ignore[reportPrivateUsage]
    if not values:
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in values.items():
        table.add_row(name, json.dumps(value, ensure_ascii=False))
    Console(stderr=not sys.stdout.isatty()).print(table, markup=False)
