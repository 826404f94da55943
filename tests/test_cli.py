"""The command line: exit codes, one-line errors, flags, and programs run from files."""

from __future__ import annotations

import io
import re
import socket
import subprocess
import sys
import textwrap

import pytest
from ramet import cli, cli_chat, cli_doctor, cli_run, cli_settings, testing
from ramet.runtime import launch
from ramet.runtime.config import EngineConfig, settings
from ramet.runtime.config_names import ABSENT
from ramet.runtime.protocol import BackendError
from ramet.runtime.scheduler.classes import parse_classes


@pytest.fixture
def ramet(capsys):
    """Run the command line in this process: (exit code, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            cli.main(arguments)
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, err

    return run


@pytest.fixture
def backend(monkeypatch):
    """What `run` and `chat` open instead of a runtime; the settings they would open it with."""
    scripted = testing.ScriptedBackend({"answer": lambda prompt: "Hi.", "n": "3", "best": "b"})
    opened = []

    class Opened:
        def __enter__(self):
            return scripted

        def __exit__(self, *exc):
            return None

    def open_backend(url, api_key, given, verbose):
        opened.append((url, given))
        return Opened()

    monkeypatch.setattr(cli_run, "open_backend", open_backend)
    monkeypatch.setattr(cli_chat, "open_backend", open_backend)
    scripted.opened = opened
    return scripted


def one_line(err: str) -> bool:
    return err.startswith("ramet: ") and err.count("\n") == 1


def test_version(ramet):
    code, out, err = ramet("--version")
    assert (code, err) == (0, "")
    assert out.startswith("ramet 0.")


def test_python_dash_m_is_the_same_program():
    done = subprocess.run(
        [sys.executable, "-P", "-m", "ramet", "--version"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert done.stdout.startswith("ramet ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "nothing"),
        (["serve", "--tp", "2"], "tensor parallelism"),
        (["serve", "--no-such-flag"], "--no-such-flag"),
        (["serve", "--page-size", "2"], "page_size=2"),
        (["serve", "--dtype", "float8"], "expected one of auto, float32"),
        (["serve", "--max-model-len", "1"], "context_length=1"),
        (["serve", "--context-length", "many"], "--context-length"),
        (["serve", "a", "--model", "b"], "two models"),
        (["run"], "FILE.py"),
        (["run", "missing.py"], "no file missing.py"),
        (["models", "fetch", "nope"], "smollm2-135m-instruct"),
        (["serve", "m", "--host", "0.0.0.0"], "set api_key, or no_auth"),
        (["chat", "--backend", "127.0.0.1:7411"], "tcp://host:port"),
        (["serve", "--quantization", "awq"], "--quantization: not supported: quantized weights"),
    ],
)
def test_wrong_use_is_two_and_takes_one_line(ramet, arguments, said):
    code, _, err = ramet(*arguments)
    assert code == 2
    assert said in err
    assert one_line(err)


def test_serve_takes_its_key_from_the_environment(ramet, monkeypatch):
    asked = []

    def start(given, **how):
        asked.append(given)
        raise BackendError("enough")

    monkeypatch.setattr(launch, "start", start)
    for variable in ("RAMET_API_KEY", "RAMET_API_KEYS"):
        monkeypatch.setenv(variable, "s3cret,other")
        assert ramet("serve", "m", "--zmq-port", "0")[0] == 1
        assert asked.pop() == {"model_path": "m", "zmq_port": 0, "api_key": "s3cret,other"}
        monkeypatch.delenv(variable)
    monkeypatch.setenv("RAMET_ADMIN_KEY", "boss")
    monkeypatch.setenv("RAMET_METRICS_KEY", "watch")
    ramet("serve", "m")
    assert asked.pop() == {"model_path": "m", "admin_key": "boss", "metrics_key": "watch"}


def test_some_flags_may_be_given_several_times(ramet, monkeypatch):
    asked = []

    def start(given, **how):
        asked.append(EngineConfig.from_settings(given))
        raise BackendError("enough")

    monkeypatch.setattr(launch, "start", start)
    flags = (
        "--api-key", "one", "--api-key", "two", "--cors-origin", "https://a.example",
        "--cors-origin", "https://b.example", "--priority-classes", '{"bulk": {"priority": 5}}',
        "--priority-classes", '{"batch": {"max_running": 2}}', "--restart-engine",
        "--drain-seconds", "3",
    )  # fmt: skip
    assert ramet("serve", "m", *flags)[0] == 1
    (config,) = asked
    assert config.api_keys == ("one", "two")
    assert config.cors_origins == ("https://a.example", "https://b.example")
    classes = parse_classes(config.priority_classes)
    assert (classes["bulk"].priority, classes["batch"].max_running) == (5, 2)
    assert config.restart_engine
    assert config.drain_seconds == 3.0
    code, _, err = ramet("serve", "m", "--priority-classes", '{"x": {"no_such": 1}}')
    assert code == 2
    assert "priority_classes" in err


@pytest.mark.parametrize("flag", ["--port", "--zmq-port"])
def test_a_port_in_use_is_named_before_a_model_is_looked_for(ramet, flag):
    ports = {"--port": "0", "--zmq-port": "0"}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports[flag] = str(taken.getsockname()[1])
        code, _, err = ramet(
            "serve", "no-such-model", *(part for pair in ports.items() for part in pair)
        )
    assert code == 1
    assert f"{ports[flag]}: Address already in use" in err
    assert f"({flag})" in err
    assert "no-such-model" not in err


def test_an_unknown_model_fails_with_one(ramet):
    code, _, err = ramet("serve", "no-such-model", "--zmq-port", "0", "--port", "0")
    assert code == 1
    assert "no-such-model" in err
    assert err.splitlines()[-1].startswith("ramet: ")
    assert "Traceback" not in err


def test_debug_shows_the_trace_wherever_it_stands(ramet):
    serve = ["serve", "no-such-model", "--port", "0", "--zmq-port", "0"]
    for arguments in (["--debug", *serve], [*serve, "--debug"]):
        code, _, err = ramet(*arguments)
        assert code == 1
        assert "Traceback" in err


@pytest.mark.parametrize("command", ["serve", "run", "chat"])
def test_help_shows_every_setting_that_applies(ramet, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = ramet(command, "--help")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    out = " ".join(out.split())
    left_out = {*cli_settings.OF_SERVERS} - {"api_key"} if command != "serve" else set()
    for setting in settings():
        flag = rf"--{setting.name.replace('_', '-')}(?![\w-])"
        assert bool(re.search(flag, out)) == (setting.name not in left_out)
        if setting.choices and setting.name not in left_out:
            assert f"[default: {setting.default}]" in out


def test_spellings_of_other_engines_are_translated():
    given = ["serve", "--max-model-len=64", "--seed", "3", "--no-enable-prefix-caching", "-x"]
    assert cli_settings.translated(given) == [
        "serve", "--context-length=64", "--random-seed", "3", "--disable-radix-cache", "-x",
    ]  # fmt: skip
    assert cli_settings.translated(["--enable-prefix-caching"]) == []


def test_every_absent_feature_is_refused_by_name(ramet):
    for name, feature in ABSENT.items():
        code, _, err = ramet("serve", f"--{name.replace('_', '-')}", "1")
        assert code == 2
        assert feature in err


def test_models_list_names_the_default(ramet):
    code, out, _ = ramet("models", "list")
    assert code == 0
    assert "smollm2-135m-instruct" in out
    assert "Apache-2.0" in out


def test_doctor_reports_every_part(ramet, tmp_path, monkeypatch):
    monkeypatch.setenv("RAMET_HOME", str(tmp_path))
    code, out, _ = ramet("doctor")
    assert code == 0, out
    for subject in ("python", "torch", "cpu", "gpu", "triton", "cache", "model", "port"):
        assert subject in out


def test_doctor_looks_at_the_port_of_http(ramet, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert "8000 is" in ramet("doctor")[1]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert "in use" in (cli_doctor._taken(port) or "")
    assert cli_doctor._taken(port) is None


def test_doctor_fails_where_the_cache_cannot_be_written(ramet, monkeypatch):
    monkeypatch.setenv("RAMET_HOME", "/proc/nowhere")
    code, out, _ = ramet("doctor")
    assert code == 1
    assert "RAMET_HOME" in out


PROGRAM = """
import ramet as rt

@rt.function
def greet(s, name, times: int | None = 2, warm: bool = False, share: "float" = 0.0):
    s += f"Hello {name}{'!' * times} {'(warm) ' * warm}{share + 1 if share else ''}"
    s += rt.gen("answer")

@rt.function
def other(s):
    s += rt.gen("n") + rt.select("best", ["a", "b"])
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "greetings.py"
    path.write_text(textwrap.dedent(PROGRAM))
    return str(path)


def test_run_streams_the_text_and_prints_variables(ramet, backend, program):
    code, out, err = ramet("run", f"{program}:greet", "--arg", "name=Ann", "--arg", "times:=1")
    assert code == 0, err
    assert out.startswith("Hello Ann! Hi.\n")
    assert '"Hi."' in out + err


def test_run_converts_arguments_as_their_annotations_say(ramet, backend, program):
    given = ("name=3", "times=3", "warm=True", "share=0.5")
    code, out, err = ramet("run", f"{program}:greet", *(f"--arg={item}" for item in given))
    assert code == 0, err
    assert out.startswith("Hello 3!!! (warm) 1.5Hi.\n")


def test_run_passes_model_and_settings(ramet, backend, program):
    code, _, err = ramet("run", f"{program}:other", "--model", "m", "--dtype", "float32")
    assert code == 0, err
    assert backend.opened == [(None, {"model_path": "m", "dtype": "float32"})]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([""], "several programs"),
        ([":nobody"], "greet, other"),
        ([":greet"], "missing a required argument: 'name'"),
        ([":greet", "--arg", "name=a", "--arg", "who=x"], "'who'"),
        ([":greet", "--arg", "name"], "NAME=TEXT"),
        ([":greet", "--arg", "name:={"], "--arg"),
        ([":greet", "--arg", "names=a"], "'names'; did you mean name?"),
        ([":greet", "--arg", "name=a", "--arg", "times=x"], "annotated as int | None; times:=JSON"),
        ([":greet", "--arg", "name=a", "--arg", "warm=x"], "annotated as bool; warm:=JSON"),
    ],
)
def test_run_says_what_is_wrong_with_its_arguments(ramet, backend, program, arguments, said):
    code, _, err = ramet("run", f"{program}{arguments[0]}", *arguments[1:])
    assert code == 2
    assert said in err
    assert one_line(err)


def test_run_fails_with_one_where_the_program_fails(ramet, backend, tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import ramet as rt\n@rt.function\ndef f(s):\n    s += s['never']\n")
    code, _, err = ramet("run", str(path))
    assert code == 1
    assert "never" in err
    assert one_line(err)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "import ramet as rt\n@rt.function\ndef f(s):\n    raise ValueError('a\\nb')\n",
            "ValueError: a b",
        ),
        ("x = (\n", "SyntaxError"),
        ("import no_such_module_there\n", "no_such_module_there"),
    ],
)
def test_an_error_of_the_users_file_takes_one_line(ramet, backend, tmp_path, source, said):
    path = tmp_path / "broken.py"
    path.write_text(source)
    code, _, err = ramet("run", str(path))
    assert code == 1
    assert said in err
    assert "broken.py" in err
    assert one_line(err)
    assert "Traceback" in ramet("--debug", "run", str(path))[2]


def test_settings_do_not_go_with_a_backend(ramet, program):
    code, _, err = ramet(
        "run", f"{program}:other", "--backend", "tcp://127.0.0.1:1", "--dtype", "float32"
    )
    assert code == 2
    assert "dtype" in err


def test_chat_keeps_the_history_until_it_is_cleared(ramet, backend, monkeypatch):
    monkeypatch.setattr(
        sys, "stdin", io.StringIO("one\n/what\n\ntwo\n/clear\nthree\n/exit\nfour\n")
    )
    code, out, err = ramet("chat", "--system", "Be kind.", "--max-tokens", "9")
    assert code == 0, err
    assert out == "Hi.\nHi.\nHi.\n"
    assert "/what is no command" in err
    prompts = [call.prompt for call in backend.calls]
    assert len(prompts) == 3
    assert all("Be kind." in prompt for prompt in prompts)
    assert "one" in prompts[1]
    assert "two" in prompts[1]
    assert "one" not in prompts[2]
    assert "three" in prompts[2]
