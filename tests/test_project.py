"""Rules of the repository itself: packages, who imports whom, what is pinned."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
IMPORT_NAMES = {"frontend_lang": "ramet", "runtime": "ramet.runtime", "kernels": "ramet.kernels"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def product_files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    names = [IMPORT_NAMES[parts[0]], *parts[1:]]
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def imports(path: Path) -> Iterator[str]:
    """Absolute names of all modules that a file imports, also inside its functions."""
    package = module_name(path)
    if path.name != "__init__.py":
        package = package.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]).rstrip(".")
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def test_every_folder_with_code_is_a_listed_package():
    found = {
        module_name(path)
        for folder in IMPORT_NAMES
        for path in product_files(folder)
        if path.name == "__init__.py"
    }
    with_code = {
        module_name(path.parent / "__init__.py")
        for folder in IMPORT_NAMES
        for path in product_files(folder)
    }
    assert with_code == found, "a folder lacks its __init__.py"
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found


def test_kernels_know_neither_the_runtime_nor_the_language():
    for path in product_files("kernels"):
        for name in imports(path):
            if within(name, "ramet"):
                assert within(name, "ramet.kernels"), f"{path}: {name}"


def test_the_runtime_does_not_know_the_language():
    for path in product_files("runtime"):
        for name in imports(path):
            if within(name, "ramet"):
                assert within(name, "ramet.runtime", "ramet.kernels"), f"{path}: {name}"


def test_the_language_knows_only_the_torch_free_parts_of_the_runtime():
    allowed = ("ramet.runtime.protocol", "ramet.runtime.program", "ramet.runtime.launch")
    # A backend's `tokenizer` is the runtime's own class; it needs no torch either.
    for_tokenizers = ("ramet.runtime.gateway.tokenizer", "ramet.runtime.model.store")
    for path in product_files("frontend_lang"):
        if path.name.startswith("cli"):
            continue
        for name in imports(path):
            if within(name, "ramet.runtime", "ramet.kernels") and name != "ramet.runtime":
                more = for_tokenizers if path.name == "remote.py" else ()
                assert within(name, *allowed, *more), f"{path}: {name}"


def test_files_stay_readable():
    for folder in IMPORT_NAMES:
        for path in product_files(folder):
            lines = len(path.read_text().splitlines())
            assert lines <= 400, f"{path.relative_to(ROOT)} has {lines} lines"


def test_nothing_that_crosses_a_process_is_executed():
    banned = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
    for folder in IMPORT_NAMES:
        for path in product_files(folder):
            assert not banned & {name.split(".")[0] for name in imports(path)}, path
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    assert node.func.id not in ("eval", "exec"), f"{path}:{node.lineno}"


def test_every_dependency_is_pinned():
    pinned = {
        line.partition("==")[0].lower().replace("_", "-")
        for file in ("constraints.txt", "constraints-cpu.txt")
        for line in (ROOT / file).read_text().splitlines()
        if "==" in line
    }
    groups = PROJECT["project"]["optional-dependencies"].values()
    listed = [entry for group in (PROJECT["project"]["dependencies"], *groups) for entry in group]
    names = {re.split(r"[\[<>=!~ ]", entry)[0].lower().replace("_", "-") for entry in listed}
    assert names <= pinned


def test_triton_is_pinned_only_where_torch_does_not_bring_it():
    assert "triton==" not in (ROOT / "constraints.txt").read_text()
    assert "triton==3.6.0" in (ROOT / "constraints-cpu.txt").read_text()


@pytest.mark.parametrize("command", ["make demo", "make test"])
def test_the_readme_names_the_two_commands(command):
    assert command in (ROOT / "README.md").read_text()
    target = command.split()[1]
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
