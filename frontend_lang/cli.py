"""The command line, also ``python -m ramet``. Exit codes: 0 done, 1 failed, 2 wrong use."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

import typer
from ramet.runtime.protocol import BadInputError, RametError

from . import cli_bench, cli_chat, cli_doctor, cli_explain, cli_models, cli_run, cli_serve
from .cli_settings import OF_SERVERS, translated

_INTERRUPTED = 130
_DEBUG = "--debug"

app = typer.Typer(
    name="ramet",
    help="Prompt programs that branch, and a runtime that computes what they share once.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's tables cut the names of flags on a narrow terminal
)
app.command("serve", short_help="Serve a model over HTTP and ZMQ.")(cli_serve.serve)
app.command("run", short_help="Run a program of a Python file.")(cli_run.run)
app.command("chat")(cli_chat.chat)
app.command("explain")(cli_explain.explain)
app.command("doctor")(cli_doctor.doctor)
app.add_typer(cli_models.app, name="models")
app.add_typer(cli_bench.app, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"ramet {version('ramet')}")
        raise typer.Exit


@app.callback()
def _root(  # pyright: ignore[reportUnusedFunction]
    debug: Annotated[
        bool, typer.Option(_DEBUG, help="Show the trace of an error.", show_default="off")
    ] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code. Errors take one line on stderr."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = _DEBUG in given
    sys.exit(_run([argument for argument in given if argument != _DEBUG], debug))


def _run(arguments: list[str], debug: bool) -> int:
    try:
        return app(translated(arguments), prog_name="ramet", standalone_mode=False) or 0
    except typer.TyperException as error:
        return _fail(error.format_message(), getattr(error, "exit_code", 2), debug)
    except RametError as error:
        of_flag = isinstance(error, BadInputError) and error.param in OF_SERVERS
        return _fail(str(error), 2 if of_flag else 1, debug)
    except OSError as error:
        return _fail(str(error), 1, debug)
    except (KeyboardInterrupt, typer.Abort):
        return _INTERRUPTED
    except Exception as error:  # most likely of the file that `ramet run` was given
        return _fail(_described(error), 1, debug)


def _described(error: Exception) -> str:
    """An error nobody foresaw: what it is, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{f.filename}:{f.lineno}" for f in frames if not f.filename.startswith("<frozen")]
    where = "" if isinstance(error, SyntaxError) or not places else f" ({places[-1]})"
    return f"{type(error).__name__}: {error}{where}; --debug shows the trace"


def _fail(message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    if message:  # empty where the help was shown instead
        print(f"ramet: {' '.join(message.split())}", file=sys.stderr)
    return code
