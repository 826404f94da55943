"""KV that left the device, through whole runtimes: the same answers wherever it comes from, and
after a restart what was written."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import ramet as rt

MODEL = "smollm2-135m-instruct"
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "tie_word_embeddings": True,
}
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
PROMPTS = [
    f"Chapter {word}. " + " ".join(f"On day {i} the {word} fox met {i} dogs." for i in range(16))
    for word in ("red", "grey", "brown", "white")
]
SHORT = [prompt[:440] for prompt in PROMPTS[:3]]


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return path


def tiny(config: Path, **settings: Any) -> rt.Runtime:
    return rt.Runtime(
        str(config),
        load_format="dummy",
        tokenizer_path=MODEL,
        dtype="float32",
        **{"random_seed": 3, "max_total_tokens": 2048, **settings},
    )


def ask(runtime: rt.Runtime, prompt: str, **more: Any) -> tuple[list[int], int]:
    """The answer, and how much of the prompt was cached."""
    reply = runtime.generate(prompt, sampling_params=GREEDY, **more)
    return reply["output_ids"], reply["meta_info"]["cached_tokens"]


def test_answers_do_not_show_where_kv_came_from(tmp_path):
    """256 slots hold one of the prompts, so each has gone when it is asked for again."""
    found = {}
    for name, settings in {
        "none": {},
        "host": {"host_cache_gb": 1.0},
        "little of both": {
            "host_cache_gb": 0.004,
            "disk_cache_dir": tmp_path / "cache",
            "disk_cache_gb": 0.02,
        },
    }.items():
        with rt.Runtime(MODEL, dtype="float32", max_total_tokens=256, **settings) as runtime:
            turns = [[ask(runtime, prompt) for prompt in SHORT] for _ in range(2)]
            found[name] = [[answer for answer, _ in turn] for turn in turns]
            cached = [tokens for _, tokens in turns[1]]
            tiers = runtime.server_info()["tiers"]
        if name == "host":
            assert min(cached) >= 112
            assert tiers["host"]["loads"] == 3 and tiers["host"]["dropped_blocks"] == 0
        elif name == "none":
            assert max(cached) < 112 and tiers == {}
    for answers in found.values():
        assert answers == found["none"]


def test_a_restart_finds_what_was_cached_and_only_that(config, tmp_path):
    folder = tmp_path / "cache"
    with tiny(config, disk_cache_dir=folder) as runtime:
        plain, cached = ask(runtime, PROMPTS[0])
        assert cached == 0
        salted, _ = ask(runtime, PROMPTS[1], cache_salt="mine")
    files = list(folder.rglob("*.kv"))
    assert len(files) > 20 and all(file.stat().st_mode & 0o777 == 0o600 for file in files)
    assert not list(folder.rglob("*.part"))
    with tiny(config, disk_cache_dir=folder) as runtime:
        answer, cached = ask(runtime, PROMPTS[0])
        assert answer == plain and cached >= 176
        # Before anything was computed: of a model as small as this loading may not pay.
        answer, cached = ask(runtime, PROMPTS[1], cache_salt="mine")
        assert answer == salted and cached >= 176
        answer, cached = ask(runtime, PROMPTS[1])
        assert answer == salted and cached < 16, "that was somebody else's"
        assert runtime.server_info()["tiers"]["disk"]["hit_tokens"] >= 352
        runtime.flush_cache()
        assert not list(folder.rglob("*.kv"))
        assert ask(runtime, PROMPTS[0]) == (plain, 0)
    with tiny(config, disk_cache_dir=folder, random_seed=4) as runtime:
        answer, cached = ask(runtime, PROMPTS[0])
        assert cached == 0, "another model"
        again, cached = ask(runtime, PROMPTS[0])
        assert answer == again and cached > 0


def test_damaged_files_are_not_loaded(config, tmp_path):
    folder = tmp_path / "cache"
    with tiny(config, disk_cache_dir=folder) as runtime:
        plain, _ = ask(runtime, PROMPTS[0])
    for file in folder.rglob("*.kv"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 16
        file.write_bytes(data)
    with tiny(config, disk_cache_dir=folder) as runtime:
        assert ask(runtime, PROMPTS[0]) == (plain, 0)


def test_a_killed_engine_leaves_what_can_be_read(config, tmp_path):
    folder = tmp_path / "cache"
    with tiny(config, disk_cache_dir=folder, max_total_tokens=512) as runtime:
        plain = [ask(runtime, prompt)[0] for prompt in PROMPTS]
        deadline = time.monotonic() + 20
        while not list(folder.rglob("*.kv")) and time.monotonic() < deadline:
            time.sleep(0.002)
        os.kill(runtime.launched.pids["engine"], signal.SIGKILL)
    with tiny(config, disk_cache_dir=folder, max_total_tokens=512) as runtime:
        assert not list(folder.rglob("*.part"))
        found = [ask(runtime, prompt) for prompt in PROMPTS]
    assert [answer for answer, _ in found] == plain
    assert any(cached for _, cached in found), "what had been evicted was written"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"host_cache_gb": -1}, "host_cache_gb=-1"),
        ({"host_cache_gb": 60000}, "host_cache_gb=60000: this machine has"),
        ({"host_cache_gb": 1e-9}, "the KV of 16 tokens takes"),
        ({"disk_cache_gb": 1}, "disk_cache_gb needs disk_cache_dir"),
        ({"disk_cache_dir": "FILE"}, "disk_cache_dir: .*FILE cannot be used"),
        ({"disk_cache_dir": "new", "disk_cache_gb": 1e-9}, "the KV of 16 tokens takes"),
        ({"host_cache_gb": 1, "disable_radix_cache": True}, "leaves nothing to keep"),
    ],
)
def test_settings_that_make_no_sense_are_refused(config, tmp_path, settings, says):
    (tmp_path / "FILE").write_text("")
    if "disk_cache_dir" in settings:
        settings = {**settings, "disk_cache_dir": str(tmp_path / settings["disk_cache_dir"])}
    with pytest.raises(rt.RametError, match=says):
        tiny(config, **settings)
