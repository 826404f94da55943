from __future__ import annotations

import subprocess
import sys

import pytest
import ramet as rt

SLOW = ("torch", "transformers", "zmq", "numpy", "httpx", "rich", "tokenizers", "jinja2")


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_loads_nothing_heavy():
    code = f"import sys, ramet; print([m for m in {SLOW!r} if m in sys.modules])"
    assert _python(code) == "[]"


def test_running_a_script_loads_no_torch():
    code = (
        "import sys, ramet as rt\n"
        "@rt.function\n"
        "def f(s):\n"
        "    s += 'x' + rt.gen('a')\n"
        "assert f.run(backend=rt.testing.ScriptedBackend({'a': '1'}))['a'] == '1'\n"
        f"print([m for m in {SLOW!r} if m in sys.modules])"
    )
    assert _python(code) == "[]"


def test_import_is_quick():
    code = (
        "import time; before = time.process_time(); import ramet; "
        "print(time.process_time() - before)"
    )
    assert min(float(_python(code)) for _ in range(3)) < 0.3


def test_exit_does_not_wait_for_a_run():
    code = (
        "import ramet as rt, time\n"
        "@rt.function\n"
        "def f(s):\n"
        "    s += rt.gen('a')\n"
        "    s['a']\n"
        "f.run(backend=rt.testing.ScriptedBackend({'a': '1'}, delay=60), stream=True)\n"
        "print('over')"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, timeout=20)
    assert done.stdout.strip() == b"over"


@pytest.mark.parametrize("name", [n for n in rt.__all__ if n not in ("OpenAI", "Runtime")])
def test_public_names_are_there(name: str):
    assert getattr(rt, name) is not None


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="image"):
        rt.image  # pyright: ignore


def test_a_fork_of_the_process_gets_its_own_loop():
    code = (
        "import os, ramet as rt\n"
        "@rt.function\n"
        "def f(s):\n"
        "    s += rt.gen('a')\n"
        "b = rt.testing.ScriptedBackend({'a': '1'})\n"
        "f.run(backend=b)['a']\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    os._exit(0 if f.run(backend=b, timeout=5)['a'] == '1' else 1)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    assert _python(code) == "0"
