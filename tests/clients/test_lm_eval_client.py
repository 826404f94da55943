"""lm-eval over HTTP, unmodified: the scores that transformers gives the same model, which are in
tests/cases."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from ramet.runtime.gateway.tokenizer import Tokenizer
from ramet.runtime.model.store import resolve

pytestmark = pytest.mark.model

CASES = Path(__file__).parent.parent / "cases"
SCRIPT = """
import json, sys
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

url, folder, model, task = sys.argv[1:]
chat = model.endswith("chat-completions")
done = simple_evaluate(
    model=model,
    model_args={
        "model": "any/name:v1",
        "base_url": url + ("/v1/chat/completions" if chat else "/v1/completions"),
        "tokenizer": folder + "/tokenizer",
        "num_concurrent": 4,
        "max_retries": 1,
        "tokenized_requests": not chat,
    },
    tasks=[task],
    task_manager=TaskManager(include_path=folder),
    apply_chat_template=chat,
    bootstrap_iters=0,
)
samples = sorted(done["samples"][task], key=lambda sample: sample["doc_id"])
scores = {k.partition(",")[0]: v for k, v in done["results"][task].items() if k.endswith("none")}
print(json.dumps({"scores": scores, "samples": [sample["resps"] for sample in samples]}))
"""
TASKS = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "label",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    "answers": {
        "output_type": "generate_until",
        "doc_to_target": "answer",
        "generation_kwargs": {"until": ["<|im_end|>"], "do_sample": False, "max_gen_toks": 48},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def cases(name: str) -> list[dict[str, Any]]:
    return json.loads((CASES / name).read_text())["cases"]


@pytest.fixture
def task(tmp_path):
    """Puts a task and the tokenizer's files into a folder; returns the folder."""
    tokenizer = Tokenizer.from_files(resolve("smollm2-135m-instruct"))
    files = tmp_path / "tokenizer"
    files.mkdir()
    inner = type(tokenizer.inner).from_str(tokenizer.inner.to_str())
    inner.save(str(files / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "chat_template": tokenizer.chat_template,
    }
    (files / "tokenizer_config.json").write_text(json.dumps(settings))

    def make(name: str, documents: list[dict[str, Any]]) -> str:
        data = tmp_path / "data.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents))
        described = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "doc_to_text": "prompt",
            "metadata": {"version": 1.0},
            **TASKS[name],
        }
        (tmp_path / f"{name}.yaml").write_text(json.dumps(described))  # JSON is YAML
        return str(tmp_path)

    return make


def test_choices_are_scored_as_transformers_scores_them(served, elsewhere, task):
    found = [c for c in cases("smollm2_select.json")
             if all(choice["joint_tokenization_identical"] for choice in c["choices"])]  # fmt: skip
    documents = [
        {
            "prompt": case["prompt"],
            "choices": [choice["choice"] for choice in case["choices"]],
            "label": [choice["choice"] for choice in case["choices"]].index(case["best_by_sum"]),
        }
        for case in found
    ]
    assert len(documents) >= 3
    said = elsewhere(SCRIPT, served.url, task("choices", documents), "local-completions", "choices")
    assert said["scores"]["acc"] == 1.0
    for case, responses in zip(found, said["samples"]):
        sums = [float(response[0][0]) for response in responses]
        want = [choice["sum_logprob"] for choice in case["choices"]]
        assert sums == pytest.approx(want, abs=2e-3)


def test_answers_are_those_of_transformers(served, elsewhere, task):
    documents = [
        {"prompt": case["prompt"], "answer": case["output_text"]}
        for case in cases("smollm2_greedy.json")
        if case["category"] == "completion"
    ]
    said = elsewhere(SCRIPT, served.url, task("answers", documents), "local-completions", "answers")
    assert said["scores"]["exact_match"] == 1.0


def test_chats_are_those_of_transformers(served, elsewhere, task):
    documents = [
        {
            "prompt": re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", case["prompt"])[-1],
            "answer": case["output_text"],
        }
        for case in cases("smollm2_greedy.json")
        if case["category"] == "chat" and case["prompt"].count("user\n") == 1
        and "named SmolLM" in case["prompt"] and case["min_top1_top2_margin"] > 1e-3
    ]  # fmt: skip
    assert documents
    folder = task("answers", documents)
    said = elsewhere(SCRIPT, served.url, folder, "local-chat-completions", "answers")
    assert said["scores"]["exact_match"] == 1.0
