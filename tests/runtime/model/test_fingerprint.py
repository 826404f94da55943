"""Another model, dtype or layout has another fingerprint; the same one elsewhere has the same."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from ramet.runtime.config import EngineConfig
from ramet.runtime.model import fingerprint as module
from ramet.runtime.model.config import ModelConfig
from ramet.runtime.model.fingerprint import fingerprint
from ramet.runtime.model.store import resolve
from safetensors.torch import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "intermediate_size": 64, "vocab_size": 100, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "rope_theta": 1e4, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
KV = torch.empty(1, 2, 32, 1, 16)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file({"weight": torch.arange(1000.0)}, folder / "model.safetensors")
    return folder


def of(folder, kv=KV, dtype=torch.float32, **settings) -> bytes:
    files = resolve(str(folder))
    config = EngineConfig.from_settings({"model_path": str(folder), **settings})
    return fingerprint(config, files, ModelConfig.load(files), kv, dtype)


def test_a_copy_of_the_model_is_the_same_model(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    assert of(folder) == of(tmp_path / "copy")
    assert len(of(folder)) == 32


def test_one_weight_makes_another(folder, monkeypatch):
    before = of(folder)
    weights = torch.arange(1000.0)
    weights[500] += 1
    save_file({"weight": weights}, folder / "model.safetensors")
    assert of(folder) != before
    # Of a file too large to be read whole the time of change counts.
    monkeypatch.setattr(module, "WHOLE_BYTES", 64)
    monkeypatch.setattr(module, "SAMPLES", 2)
    monkeypatch.setattr(module, "SAMPLE_BYTES", 16)
    large = of(folder)
    assert large == of(folder)
    weights[500] += 1
    save_file({"weight": weights}, folder / "model.safetensors")
    assert of(folder) != large


def test_so_do_config_dtype_and_layout(folder):
    before = of(folder)
    assert of(folder, dtype=torch.bfloat16) != before
    assert of(folder, kv=KV.bfloat16()) != before
    assert of(folder, kv=KV.expand(3, 2, 32, 1, 16)) != before
    assert of(folder, kv=torch.empty(1, 2, 999, 1, 16)) == before, "how much there is does not"
    (folder / "config.json").write_text(json.dumps({**CONFIG, "rope_theta": 5e4}))
    assert of(folder) != before


def test_made_up_weights_are_their_seed(folder):
    one = of(folder, load_format="dummy", random_seed=1)
    assert one == of(folder, load_format="dummy", random_seed=1)
    assert one != of(folder, load_format="dummy", random_seed=2)
    assert one != of(folder)
