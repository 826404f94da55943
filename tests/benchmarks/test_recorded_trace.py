"""What a live engine records is played again, and finds what the engine found."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import ramet as rt
from ramet.runtime.engine.trace_file import Began, Entry, Seen, frame, open_private, read_trace

RADIX = Path(__file__).parents[2] / "benchmarks" / "radix.py"
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "intermediate_size": 64, "vocab_size": 500, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "rope_theta": 1e4, "max_position_embeddings": 2048, "tie_word_embeddings": True,
    "eos_token_id": 1, "bos_token_id": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def recorded_module(bench_module):
    return bench_module("radix_recorded")


@pytest.fixture(scope="module", params=["lru", "program"])
def recording(request, tmp_path_factory):
    """A trace of agents and single prompts in a cache that does not hold them, and the engine's own
    account of it."""
    folder = tmp_path_factory.mktemp("recording")
    config = folder / "tiny.json"
    config.write_text(json.dumps(TINY))
    path = folder / "requests.trace"
    dice = np.random.default_rng(0)

    @rt.function
    def agent(s, task):
        s += "You are an agent of few words and many deeds. " * 3 + task
        for turn in range(3):
            s += f" Turn {turn}:" + rt.gen("step", max_tokens=4 + turn, ignore_eos=True)
            s += str(s["step"])[:3] + " Observed: " + task * 2
        s += rt.select("verdict", [" good", " bad"])

    settings = {
        "load_format": "dummy", "dtype": "float32", "device": "cpu", "random_seed": 3,
        "max_total_tokens": 4096, "record_trace": str(path),
        "radix_eviction_policy": request.param,
    }  # fmt: skip
    with rt.Runtime(str(config), **settings) as runtime:
        stems = [dice.integers(2, 500, 300).tolist() for _ in range(20)]
        for _ in range(80):
            stem = stems[int(dice.integers(0, 20))]
            prompts = [stem + dice.integers(2, 500, 40).tolist() for _ in range(2)]
            params = {"max_new_tokens": 8, "ignore_eos": True}
            runtime.generate(input_ids=prompts, sampling_params=params)
        runtime.generate(input_ids=stems[0], sampling_params={"max_new_tokens": 4}, cache_salt="x")
        for task in range(6):
            agent.run(f"task {task} of six", backend=runtime)
        info = runtime.server_info()
    return path, info


def test_the_file_is_its_owners_and_holds_no_tokens(recording):
    path, _ = recording
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    data = path.read_bytes()
    assert b"agent of few words" not in data
    stem = np.random.default_rng(0).integers(2, 500, 300).astype(np.int32)
    for kind in (np.int32, np.uint16):
        assert stem[:8].astype(kind).tobytes() not in data


def test_it_counts_what_the_engine_counted(recording):
    path, info = recording
    seen = [one for one in read_trace(path) if isinstance(one, Seen)]
    assert sum(one.entry.prompt for one in seen) == info["prompt_tokens"]
    assert sum(one.entry.cached for one in seen) == info["cache_hit_tokens"] > 0
    assert sum(one.entry.lost for one in seen) == 0
    assert all(one.entry.arrived <= one.entry.admitted <= one.entry.ended for one in seen)
    programs = {one.entry.program for one in seen if one.entry.keep}
    assert len(programs - {0}) >= 6
    # What begins alike is written once.
    assert sum(len(one.entry.rest) for one in seen) < sum(2 * len(one.hashes) for one in seen) * 0.8


def test_played_again_it_finds_what_the_engine_found(recording, recorded_module):
    path, info = recording
    counted = recorded_module.replay(path)
    engine = info["cache_hit_tokens"] / info["prompt_tokens"]
    assert counted.prompt == info["prompt_tokens"]
    assert counted.slots == 4096
    assert counted.again / counted.prompt == pytest.approx(engine, abs=0.01)
    assert 0.2 < engine < 0.9
    larger = recorded_module.replay(path, slots=65536)
    assert larger.again > counted.again


def test_what_one_salt_wrote_is_not_found_by_another(recording, recorded_module):
    path, _ = recording
    seen = [one for one in read_trace(path) if isinstance(one, Seen)]
    salted = [one for one in seen if one.entry.prompt == 300]
    assert len(salted) == 1
    others = [one for one in seen if one is not salted[0] and len(one.hashes) > 300]
    assert not any((one.hashes[:4] == salted[0].hashes[:4]).all() for one in others)


def test_its_beginning_is_a_trace_like_any_other(recording, recorded_module, simulate, traces):
    path, info = recording
    trace = recorded_module.beginning(path, 10_000)
    seen = [one for one in read_trace(path) if isinstance(one, Seen)]
    assert len(trace) == len(seen)
    # Output that another prompt went on from in its middle counts as two segments.
    assert trace.prompt_tokens() == pytest.approx(info["prompt_tokens"], rel=0.01)
    full = trace.working_set()
    assert simulate.belady(trace, full) > simulate.belady(trace, full // 4)
    hits = simulate.replay(trace, int(trace.lengths.sum()), "lru")
    assert hits == pytest.approx(simulate.belady(trace, full), rel=0.01)
    assert (trace.after >= 0).sum() > 0
    assert len(recorded_module.beginning(path, 5)) == 5


def test_the_command_takes_it(recording):
    path, _ = recording
    command = [sys.executable, str(RADIX), "--simulate", str(path), "--requests", "60",
               "--replay-only"]  # fmt: skip
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}  # it is a script
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=variables)
    assert done.returncode == 0, done.stderr
    shown = done.stdout
    assert "requests: the engine itself" in shown
    assert "requests: program, 4096 tokens" in shown
    assert "requests: Belady" in shown


def make(path, entries):
    file = open_private(path)
    os.write(file, frame(Began(slots=1 << 14, eviction="lru", policy="fcfs", time=0.0)))
    for entry in entries:
        os.write(file, frame(entry))
    os.close(file)


def long_recording(count):
    dice = np.random.default_rng(1)
    for number in range(count):
        hashes = dice.integers(0, 65536, 200).astype("<u2").tobytes()
        yield Entry(
            arrived=number * 0.01, admitted=number * 0.01, ended=number * 0.01 + 1, prompt=180,
            most=179, cached=0, rest=hashes, program=number + 1, keep=True, remaining=1,
        )  # fmt: skip


def test_memory_does_not_grow_with_the_file(tmp_path, recorded_module):
    peaks = []
    for count in (6_000, 18_000):
        path = tmp_path / f"{count}.trace"
        make(path, long_recording(count))
        tracemalloc.start()
        recorded_module.replay(path, "program")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] * 1.25


def test_two_recordings_in_one_file_are_two(tmp_path, recorded_module):
    path = tmp_path / "two.trace"
    make(path, long_recording(3))
    make(path, long_recording(4))
    kinds = [type(one) for one in read_trace(path)]
    assert (kinds.count(Began), kinds.count(Seen)) == (2, 7)
    assert recorded_module.replay(path).again == 0, "hashes of two recordings mean nothing together"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [(Entry(arrived=0, admitted=0, ended=0, prompt=2, most=1, cached=0, back=1), "refers"),
     (Entry(arrived=0, admitted=0, ended=0, prompt=2, most=1, cached=0, rest=b"ab"), "prompt"),
     (Entry(arrived=0, admitted=0, ended=0, prompt=1, most=1, cached=0, rest=b"a"), "half"),
     (Entry(arrived=0, admitted=0, ended=0, prompt=1, most=1, cached=0, rest=b"ab", common=1),
      "shares")],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(tmp_path, wrong, said):
    path = tmp_path / "wrong.trace"
    make(path, [wrong])
    with pytest.raises(ValueError, match=said):
        list(read_trace(path))


def test_a_file_that_is_something_else_is_left_alone(tmp_path):
    path = tmp_path / "letter.txt"
    path.write_text("dear reader")
    with pytest.raises(ValueError, match="no recorded trace"):
        list(read_trace(path))
    with pytest.raises(FileExistsError):
        open_private(path)
    assert path.read_text() == "dear reader"
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="link"):
        open_private(tmp_path / "link")


def test_a_frame_that_was_cut_short_is_left_out(tmp_path):
    path = tmp_path / "cut.trace"
    make(path, long_recording(3))
    path.write_bytes(path.read_bytes()[:-5])
    assert sum(isinstance(one, Seen) for one in read_trace(path)) == 2
    make(tmp_path / "wrong.trace", [])
    path = tmp_path / "wrong.trace"
    path.write_bytes(path.read_bytes() + b"\xff\xff\xff\xff")
    with pytest.raises(ValueError, match="a frame of"):
        list(read_trace(path))


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["gone.trace"], 1, "No such file"),
        (["empty.trace"], 1, "empty.trace holds no requests"),
        (["all", "--requests", "0"], 2, "--requests"),
    ],
)
def test_what_cannot_be_simulated_is_said_in_a_line(tmp_path, arguments, code, said):
    make(tmp_path / "empty.trace", [])
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, str(RADIX), "--simulate", *arguments],
        capture_output=True, text=True, timeout=60, env=variables, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == code
    assert said in done.stderr and "Traceback" not in done.stderr
