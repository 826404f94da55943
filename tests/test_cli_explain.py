"""``ramet explain``: what it prints and its exit codes."""

from __future__ import annotations

import json
import textwrap

import pytest
import ramet as rt
from ramet import cli
from ramet.runtime import launch

RULES = "These are rules that each run of this program has in common. " * 3


@pytest.fixture
def ramet(capsys):
    """Run the command line in this process: (exit code, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            cli.main(["explain", *arguments])
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, err

    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A config alone: its tokens are bytes."""
    path = tmp_path_factory.mktemp("tiny") / "config.json"
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 258,
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 16, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
        "eos_token_id": 257, "bos_token_id": 256,
    }  # fmt: skip
    path.write_text(json.dumps(config))
    return str(path)


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(
        textwrap.dedent(f"""\
            import ramet as rt
            RULES = {RULES!r}

            @rt.function
            def main(s, name):
                s += name
                s += RULES + rt.gen("x")

            @rt.function
            def good(s, name):
                s += RULES + name + rt.gen("x")

            @rt.function
            def asks(s, name):
                s += name
                s += RULES
                if int(name):
                    s += rt.gen("x")
            """)
    )
    return str(path)


def test_where_two_prompts_part(ramet, model):
    code, out, err = ramet("abc left", "abc rest", "--model", model)
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "shared    4 tokens, of 8 and 8"
    assert '"left"  (token 108)' in out
    assert '"rest"  (token 114)' in out


def test_equal_prompts_and_one_that_goes_on(ramet, model):
    code, out, _ = ramet("abc", "abc", "--model", model)
    assert (code, out) == (0, "shared    3 tokens, of 3 and 3\n")
    code, out, _ = ramet("abc", "abcd", "--model", model)
    assert code == 0
    assert "first   ends here" in out
    assert 'second  "d"' in out


def test_nothing_in_a_text_changes_how_a_line_is_shown(ramet, model):
    code, out, _ = ramet("a\u202e\x1b[31m\x9b1", "a\u202e\x1b[31m\x9b2", "--model", model)
    assert code == 0
    assert r"a\u202e\u001b[31m\u009b" in out
    assert all(line.isprintable() for line in out.splitlines())


def test_prompts_of_files_and_json(ramet, model, tmp_path):
    for name, text in (("a", "same é1"), ("b", "same é2")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    code, out, _ = ramet(f"@{tmp_path}/a", f"@{tmp_path}/b", "--model", model, "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["prompt_tokens"], found["other_tokens"]) == (8, 8)
    assert (found["explanation"]["index"], found["explanation"]["before"]) == (7, "same é")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "two prompts"),
        (["one"], "two prompts"),
        (["one", ""], "empty"),
        (["one", "@/no/such/file"], "cannot read"),
        (["one", "two", "three"], "three"),
        (["one", "two", "--cache-salt", "x"], "--cache-salt"),
        (["--backend", "tcp://127.0.0.1:1"], "needs a prompt"),
        (["one", "--lint", "file.py"], "--lint takes neither"),
        (["--lint", "no_such_file.py"], "no file"),
        (["--lint", "no_such_file.json"], "no file"),
        (["--lint", "x.py", "--min-tokens", "0"], "min-tokens"),
    ],
)
def test_wrong_use_is_2(ramet, arguments, said):
    code, out, err = ramet(*arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert err.startswith("ramet: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["a", "b", "--model", "./no/such/folder"],
        ["a", "--backend", "http://127.0.0.1:1"],
    ],
)
def test_what_fails_is_1(ramet, arguments):
    code, out, err = ramet(*arguments)
    assert (code, out) == (1, "")
    assert err.count("\n") == 1


def test_a_program_with_findings_is_1(ramet, model, program):
    code, out, err = ramet("--lint", program, "--model", model)
    assert (code, err) == (1, "")
    first, run, end = out.splitlines()
    assert (
        first
        == f"program.py:6: the argument {{name}} stands before {len(RULES)} tokens of fixed text"
    )
    assert run.endswith("# program.py:7")
    assert end.split() == f"runs share 0 tokens of text; with it behind, {len(RULES)}".split()


def test_a_program_without_is_0(ramet, model, program):
    code, out, _ = ramet("--lint", f"{program}:good", "--model", model)
    assert (code, out.count("\n")) == (0, 1)
    code, *_ = ramet("--lint", program, "--model", model, "--min-tokens", "1000")
    assert code == 0
    code, out, _ = ramet("--lint", f"{program}:good", "--model", model, "--json")
    assert (code, json.loads(out)) == (0, [])


def test_a_program_that_needs_values_is_looked_at_up_to_there(ramet, model, program):
    code, out, err = ramet("--lint", f"{program}:asks", "--model", model)
    assert code == 1
    assert "program.py:17" in err
    assert "{name}" in out


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_program_in_its_json_form(ramet, model, tmp_path, wrapped):
    text = {"type": "text", "parts": [{"type": "arg", "name": "who"}, RULES]}
    program = {"instructions": [text, {"type": "gen", "op": 1, "name": "x"}], "args": ["who"]}
    path = tmp_path / "program.json"
    path.write_text(json.dumps({"program": program} if wrapped else program))
    code, out, _ = ramet("--lint", str(path), "--model", model, "--json")
    (found,) = json.loads(out)
    assert code == 1
    assert (found["variable"], found["gained"]) == ("{who}", len(RULES))


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"instructions": 3}', "null", '{"model_type": "llama"}']
)
def test_json_that_is_no_program_is_wrong_use(ramet, model, tmp_path, text):
    path = tmp_path / "program.json"
    path.write_text(text)
    code, out, err = ramet("--lint", str(path), "--model", model)
    assert (code, out) == (2, "")
    assert "is no program" in err


def test_against_a_cache_that_lives(ramet, model):
    settings = {
        "model_path": model, "load_format": "dummy", "dtype": "float32", "port": 0, "zmq_port": 0,
        "max_total_tokens": 1024, "served_model_name": "tiny", "api_key": "k", "admin_key": "a",
    }  # fmt: skip
    running = launch.start(settings, listen=True)
    try:
        tcp = next(url for url in running.addresses if url.startswith("tcp"))
        with rt.RuntimeEndpoint(tcp, api_key="k") as backend:
            for end in "xyz":
                backend.generate(f"cached here: {end}", sampling_params={"max_new_tokens": 1})
        for url in (tcp, str(running.url)):
            code, out, _ = ramet("cached here: w", "--backend", url, "--api-key", "k")
            assert code == 0
            assert out.startswith("cached    13 of 14 tokens: the cached text goes on with")
            assert "one of 3 ways on" in out
            code, out, _ = ramet("ab", "ac", "--backend", url, "--api-key", "k")
            assert out.startswith("shared    1 tokens, of 2 and 2")
        admin = ("--backend", str(running.url), "--api-key", "a")
        _, out, _ = ramet("cached here: w", *admin)
        assert "nothing is cached" in out.splitlines()[0]
        assert "elsewhere 13 tokens in namespace" in out
        code, _, err = ramet("x", "--backend", str(running.url), "--api-key", "wrong")
        assert code == 1
        assert "key" in err
    finally:
        running.stop()
