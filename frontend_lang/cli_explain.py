"""``ramet explain``: where two prompts part, where one leaves a server's cache, and what of a
program would be found cached in another order."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
import typer
from ramet.runtime.program.instructions import Program
from ramet.runtime.protocol import ProgramError

from .cli_run import find_function, open_backend
from .reuse import LEAST_TOKENS, Finding, findings
from .trace import trace_function

_MODEL = "smollm2-135m-instruct"
_REASONS = {
    "differs": "the cached text goes on with something else",
    "ends": "what is cached ends here",
    "whole": "all of it is there",
    "empty": "nothing is cached",
    "off": "this server caches nothing",
}
_MOST_SHOWN = 100


def explain(
    prompt_a: Annotated[
        str | None, typer.Argument(metavar="PROMPT_A", help="A text, or @FILE.", show_default=False)
    ] = None,
    prompt_b: Annotated[
        str | None, typer.Argument(metavar="PROMPT_B", help="A text, or @FILE.", show_default=False)
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option("--backend", metavar="URL", help="Ask the cache at tcp://… or http://…."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", help="Key for --backend.", envvar="RAMET_API_KEY")
    ] = None,
    cache_salt: Annotated[
        str | None, typer.Option("--cache-salt", help="With --backend: of the requests meant.")
    ] = None,
    lint: Annotated[
        str | None,
        typer.Option(
            "--lint", metavar="FILE[:function]", help="A program: a Python file, or its JSON form."
        ),
    ] = None,
    least: Annotated[
        int, typer.Option("--min-tokens", min=1, help="With --lint: what is worth a word.")
    ] = LEAST_TOKENS,
    model: Annotated[
        str, typer.Option("--model-path", "--model", help="Whose tokenizer cuts the text.")
    ] = _MODEL,
    as_json: Annotated[bool, typer.Option("--json", help="For other programs to read.")] = False,
) -> None:
    """Say why a prompt is (not) found in the cache.

    Two prompts: where they part. One prompt and --backend: where it leaves what is cached there.
    --lint: variable text of a program that stands before fixed text; the exit code is 1 where there
    is any.
    """
    given = [text for text in (prompt_a, prompt_b) if text is not None]
    if lint is not None:
        if given or backend is not None:
            raise typer.BadParameter("--lint takes neither prompts nor --backend")
        found = _lint(lint, least, model, as_json)
        if found:
            raise typer.Exit(1)
        return
    texts = [_text(text) for text in given]
    if backend is None:
        if len(texts) != 2:
            raise typer.BadParameter("two prompts are needed, or one and --backend, or --lint FILE")
        if cache_salt is not None:
            raise typer.BadParameter("--cache-salt means nothing without --backend")
        shown = _compared(texts[0], texts[1], model)
    elif not texts:
        raise typer.BadParameter("--backend needs a prompt")
    else:
        with open_backend(backend, api_key, {}, False) as runtime:
            shown = runtime.explain(*texts, cache_salt=cache_salt)
    if as_json:
        print(json.dumps(shown, ensure_ascii=False, indent=2))
    else:
        print("\n".join(_lines(shown)))


def _text(given: str) -> str:
    """The text itself, or that of the file it names. An empty one is wrong use."""
    text = given
    if given.startswith("@"):
        try:
            text = Path(given[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise typer.BadParameter(f"cannot read {given[1:]}: {error}") from None
    if not text:
        raise typer.BadParameter("a prompt is empty")
    return text


def _tokenizer(model: str) -> Any:
    from ramet.runtime.gateway.tokenizer import Tokenizer
    from ramet.runtime.model.store import resolve

    return Tokenizer.from_files(resolve(model, fetch=False))


def _compared(a: str, b: str, model: str) -> dict[str, Any]:
    import numpy as np
    from ramet.runtime.gateway.explanation import compared

    tokenizer = _tokenizer(model)
    ids, other = (
        np.asarray(tokenizer.encode(text, special=True, start=True), np.int32) for text in (a, b)
    )
    found = msgspec.to_builtins(compared(tokenizer, ids, other))
    return {"prompt_tokens": len(ids), "other_tokens": len(other), "explanation": found}


# --- for people -----------------------------------------------------------------------------------


def _lines(shown: dict[str, Any]) -> Iterable[str]:
    count, found = shown["prompt_tokens"], shown["explanation"]
    if "other_tokens" in shown:
        yield f"shared    {found['index']} tokens, of {count} and {shown['other_tokens']}"
        yield from _sides(found, "first", "second")
        return
    yield f"cached    {found['index']} of {count} tokens: {_REASONS[found['reason']]}"
    yield from _sides(found, "prompt", "cached")
    elsewhere = shown.get("elsewhere")
    if elsewhere is not None:
        other = elsewhere["explanation"]
        yield f"elsewhere {other['index']} tokens in namespace {elsewhere['namespace'] or '(none)'}"
        yield from _sides(other, "prompt", "cached")


def _sides(found: dict[str, Any], mine: str, theirs: str) -> Iterable[str]:
    if found["reason"] == "whole" and found["neighbour"] is None:
        return
    if found["before"]:
        yield f"  up to   {_quoted(found['before'], tail=True)}"
    for name, text, token in (
        (mine, found["after"], found["token"]),
        (theirs, found["neighbour"], found["neighbour_token"]),
    ):
        if token is None:
            yield f"  {name:<8}ends here"
        else:
            yield f"  {name:<8}{_quoted(text)}  (token {token})"
    if found["branches"] > 1:
        yield f"          one of {found['branches']} ways on, found {found['hits']} times before"


def _quoted(text: str, tail: bool = False) -> str:
    if len(text) > _MOST_SHOWN:
        text = "…" + text[-_MOST_SHOWN:] if tail else text[:_MOST_SHOWN] + "…"
    return _visible(text)


def _visible(text: str) -> str:
    """In quotes, and so that nothing in it changes how the rest of a line is shown."""
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in quoted)


# --- programs -------------------------------------------------------------------------------------


def _lint(target: str, least: int, model: str, as_json: bool) -> list[Finding]:
    program, cut = _from_json(Path(target)) if target.endswith(".json") else _traced(target)
    tokenizer = _tokenizer(model)
    found = findings(program, lambda text: len(tokenizer.encode(text)), least, cut=cut)
    if as_json:
        rows = [{**msgspec.to_builtins(finding), "gained": finding.gained} for finding in found]
        print(json.dumps(rows, ensure_ascii=False, indent=2))
    elif found:
        print("\n".join(line for finding in found for line in _described(finding)))
    else:
        print(f"no fixed text of {least} tokens or more stands behind variable text")
    return found


def _described(finding: Finding) -> Iterable[str]:
    where = f"{finding.where}: " if finding.where else ""
    before = f"{finding.gained} tokens of fixed text"
    yield f"{where}{finding.kind} {finding.variable} stands before {before}"
    for run in finding.behind:
        place = f"  # {run.where}" if run.where else ""
        yield f"  {run.tokens:>6}  {_visible(run.head)}{place}"
    more = finding.shared + finding.gained
    many = f" ({finding.prompts} prompts begin so)" if finding.prompts > 1 else ""
    yield f"  runs share {finding.shared} tokens of text; with it behind, {more}{many}"


def _traced(target: str) -> tuple[Program, bool]:
    """The program of a function; where it needs values to go on, what it does before (true)."""
    function = find_function(target)
    try:
        return function.trace().program, False
    except ProgramError as error:
        print(f"ramet: only the part before this is looked at: {error}", file=sys.stderr)
    return trace_function(function, function.parameters.bound, cut=True).program, True


def _from_json(path: Path) -> tuple[Program, bool]:
    """A `Program`, by itself or as the body of a request that opens it."""
    if not path.is_file():
        raise typer.BadParameter(f"there is no file {path}")
    try:
        data = msgspec.json.decode(path.read_bytes())
        inner: Any = data
        if isinstance(data, dict):
            inner = cast("dict[str, Any]", data).get("program", data)
        if isinstance(inner, dict) and "instructions" not in inner:
            raise typer.BadParameter(f"{path} is no program: it has no instructions")
        return msgspec.convert(inner, Program), False
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise typer.BadParameter(f"{path} is no program: {error}") from None
