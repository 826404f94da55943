"""How `ramet bench` shows what it measures."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

OutFile = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Also write the figures as JSON.")
]


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Mean, median, 90th and 99th of seconds, in milliseconds."""
    ordered = sorted(values)
    found = {"mean": sum(ordered) / len(ordered)}
    for percent in (50, 90, 99):
        found[f"p{percent}"] = ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]
    return {name: round(1000 * value, 2) for name, value in found.items()}


def progress(what: str) -> Progress:
    """A bar on stderr, where somebody looks at it."""
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=not sys.stderr.isatty(), transient=True)


def show(figures: dict[str, Any], out: Path | None) -> None:
    """A table on stdout, and JSON where wanted."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right")
    for name, value in figures.items():
        if isinstance(value, dict):
            parts = (f"{key} {part:,.2f}" for key, part in value.items())  # pyright: ignore
            table.add_row(name.replace("_", " "), "  ".join(parts))
        else:
            shown = f"{value:,}" if isinstance(value, int | float) else str(value)
            table.add_row(name.replace("_", " "), shown)
    Console().print(table, markup=False)
    if out is not None:
        out.write_text(json.dumps(figures, indent=1) + "\n")
