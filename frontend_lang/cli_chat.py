"""``ramet chat``: a conversation in the terminal, one program that grows turn by turn."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from .cli_run import open_backend
from .cli_settings import OF_SERVERS, with_model, with_settings

_HELP = "Ctrl-D or /exit ends, /clear forgets, Ctrl-C cuts an answer short."


@with_settings(leave_out=OF_SERVERS)
def chat(
    model: Annotated[
        str | None, typer.Argument(help="Alias, folder, .gguf file or hub id.", show_default=False)
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="A system message.")] = None,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0)] = 0.7,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Longest answer, in tokens.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option("--backend", metavar="URL", help="Chat at tcp://… or http://….")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", help="Key for --backend.", envvar="RAMET_API_KEY")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show start-up and logs.")] = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Chat with a model. Each turn computes only what is new: the rest is in the tree."""
    sampling = {"temperature": temperature, "max_tokens": max_tokens}
    with open_backend(backend, api_key, with_model(settings, model), verbose) as runtime:
        conversation = Conversation(runtime, system, sampling)
        if sys.stdin.isatty():
            import readline  # noqa: F401  # pyright: ignore[reportUnusedImport]  # edits the line

            print(_HELP, file=sys.stderr)
        for line in _lines():
            if line == "/exit":
                break
            if line == "/clear":
                conversation.clear()
            elif line.startswith("/"):
                print(f"{line} is no command. {_HELP}", file=sys.stderr)
            elif line:
                _answer(conversation, line)


class Conversation:
    """Turns so far. Every turn is a program of all of them, so that what is cached is found again
    after an answer was cut short too."""

    def __init__(self, backend: Any, system: str | None, sampling: dict[str, Any]) -> None:
        self._backend = backend
        self._system = system
        self._sampling = {name: value for name, value in sampling.items() if value is not None}
        self._turns: list[tuple[str, str]] = []

    def clear(self) -> None:
        """Forget all turns but the system message."""
        self._turns = []

    def ask(self, text: str) -> Iterator[str]:
        """The answer, piece by piece. What has come when the caller stops is what is remembered."""
        from . import assistant, function, gen, system, user

        @function
        def turn(s: Any) -> None:
            if self._system is not None:
                s += system(self._system)
            for question, answer in self._turns:
                s += user(question)
                s += assistant(answer)
            s += user(text)
            s += assistant(gen("answer", **self._sampling))

        state = turn.run(backend=self._backend, stream=True)
        said: list[str] = []
        try:
            for piece in state.text_iter("answer"):
                said.append(piece)
                yield piece
        except BaseException:
            state.cancel()
            raise
        finally:
            self._turns.append((text, "".join(said)))


def _answer(conversation: Conversation, line: str) -> None:
    try:
        for piece in conversation.ask(line):
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stdout.write(" …")
    print(flush=True)


def _lines() -> Iterator[str]:
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            yield input(prompt).strip()
        except EOFError:
            return
