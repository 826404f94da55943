"""``ramet models``: what there is under a short name, and fetching it."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(help="Models that have a short name.", no_args_is_help=True)

_MIB = 1 << 20


@app.command("list")
def list_() -> None:
    """Show every alias, and which are on this machine."""
    from ramet.runtime.model import store

    for row in store.list_models():
        where = str(row.path) if row.path else f"not fetched ({row.download_size / _MIB:.0f} MiB)"
        print(f"{row.alias:24}{row.size / _MIB:5.0f} MiB  {row.license}")
        print(f"    {row.summary}")
        print(f"    {where}")


@app.command("fetch")
def fetch(
    alias: Annotated[str, typer.Argument(help="One of `ramet models list`.")] = (
        "smollm2-135m-instruct"
    ),
) -> None:
    """Download a model, check it, and put it into the cache folder. One that is there stays."""
    from ramet.runtime.model import catalog, store

    entry = catalog.find(alias)
    if entry is None:
        known = ", ".join(entry.alias for entry in catalog.CATALOG)
        raise typer.BadParameter(f"{alias} is none of {known}")
    path = store.cached_path(entry) or store.installed_path(entry)
    if path is None:
        from ramet.runtime.model.fetch import fetch_model

        path = fetch_model(entry)
    print(f"{entry.alias}: {path}")
