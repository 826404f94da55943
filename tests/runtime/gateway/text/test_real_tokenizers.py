"""The tokenizers of real models, against ids that other software gave for them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ramet.runtime.gateway.detokenizer import Detokenizer
from ramet.runtime.gateway.tokenizer import Tokenizer
from ramet.runtime.model import catalog, store

CASES = Path(__file__).parents[3] / "cases"

pytestmark = pytest.mark.model


def cases(name: str) -> list[dict[str, Any]]:
    return json.loads((CASES / name).read_text(encoding="utf-8"))["cases"]


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return Tokenizer.from_files(store.resolve("smollm2-135m-instruct"))


@pytest.fixture(scope="module")
def gemma3() -> Tokenizer:
    entry = catalog.find("gemma3-270m")
    assert entry is not None
    if store.cached_path(entry) is None:
        pytest.skip("gemma3-270m is not fetched (`ramet models fetch gemma3-270m`)")
    return Tokenizer.from_files(store.resolve("gemma3-270m"))


@pytest.mark.parametrize("case", cases("smollm2_greedy.json"), ids=lambda case: case["id"])
def test_smollm2_prompts_and_outputs(smollm2: Tokenizer, case: dict[str, Any]) -> None:
    assert smollm2.encode(case["prompt"], start=True) == case["prompt_token_ids"]
    assert smollm2.decode(case["output_token_ids"]) == case["output_text"]


@pytest.mark.parametrize("case", cases("gemma3_greedy.json"), ids=lambda case: case["id"])
def test_gemma3_prompts_and_outputs(gemma3: Tokenizer, case: dict[str, Any]) -> None:
    assert gemma3.encode(case["prompt"], start=True) == case["prompt_token_ids"]
    assert gemma3.decode(case["output_token_ids"]) == case["output_text"]


def test_what_smollm2_declares(smollm2: Tokenizer) -> None:
    assert smollm2.eos_ids == (2,)
    assert smollm2.bos_id == 1
    assert smollm2.prefix_ids == ()
    assert smollm2.vocab_size == len(smollm2.bytes_table) == 49152
    assert len(smollm2.special_ids) == 17


def test_smollm2_chat(smollm2: Tokenizer) -> None:
    chats = [case for case in cases("smollm2_greedy.json") if case["category"] == "chat"]
    assert chats
    for case in chats:
        parts = case["prompt"].split("<|im_start|>")[1:-1]
        pairs = [part.removesuffix("<|im_end|>\n").split("\n", 1) for part in parts]
        messages = [{"role": role, "content": content} for role, content in pairs]
        assert smollm2.apply_chat_template(messages) == case["prompt"]
        session = smollm2.template.session()
        segments: list[tuple[str, bool]] = []
        for role, content in pairs:
            segments += [(session.open(role).prefix, True), (content, False)]
            segments.append((session.close(), True))
        segments.append((session.open("assistant").prefix, True))
        assert smollm2.encode_segments(segments) == case["prompt_token_ids"]


# SmolLM2's vocabulary lacks a few bytes: it cannot say these control characters, nor the planes
# above the third, which hold no characters yet.
LACKING = "\x04\x06\x13\x14\x16\x1d"
writable = st.text(
    st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs"], exclude_characters=LACKING),
    max_size=40,
)


def test_bytes_that_smollm2_lacks(smollm2: Tokenizer) -> None:
    single = {data[0] for data in smollm2.bytes_table if len(data) == 1}
    legal = set(range(0xF5)) - {0xC0, 0xC1}
    assert legal - single == {*LACKING.encode(), 0xF1, 0xF2}


@settings(max_examples=150, deadline=None)
@given(text=writable)
def test_smollm2_bytes(smollm2: Tokenizer, text: str) -> None:
    ids = smollm2.encode(text, special=False)
    assert b"".join(map(smollm2.token_bytes, ids)) == text.encode()


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40).filter(lambda text: "\u2581" not in text))
def test_gemma3_bytes(gemma3: Tokenizer, text: str) -> None:
    ids = gemma3.encode(text, special=False)
    assert b"".join(map(gemma3.token_bytes, ids)) == text.encode()


@settings(max_examples=100, deadline=None)
@given(text=writable, data=st.data())
def test_streams_of_real_tokens(smollm2: Tokenizer, text: str, data: st.DataObject) -> None:
    ids = smollm2.encode(text + " 🦊 naïve 日本語\n", special=False)
    stop = data.draw(st.sampled_from(["🦊", " na", "日本", "\n", "zz", text[3:6] or "zz"]))
    detokenizer = Detokenizer(smollm2.bytes_table, smollm2.special_ids, True, (stop.encode(),))
    pieces = [detokenizer.push([i]) for i in ids] + [detokenizer.finish()]
    whole = text + " 🦊 naïve 日本語\n"
    assert "".join(pieces) == whole.split(stop)[0]


def test_a_start_is_quick(smollm2: Tokenizer) -> None:
    files = store.resolve("smollm2-135m-instruct")
    best = 9.0
    for _ in range(3):
        began = time.perf_counter()
        Tokenizer.from_files(store.ModelFiles("gguf", "x", None, gguf_path=files.gguf_path))
        best = min(best, time.perf_counter() - began)
    assert best < 1.0  # 0.1 s on a quiet machine
