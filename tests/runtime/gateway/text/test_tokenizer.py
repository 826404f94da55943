"""Text to ids and back, against the library and against the text itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from ramet.runtime.gateway.tokenizer import Tokenizer
from ramet.runtime.model.store import resolve
from ramet.runtime.protocol.errors import BadInputError, ModelError
from tokenizers import models, pre_tokenizers

SPECIALS = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<|im|>"]
PIECES = [
    *SPECIALS,
    "<tool>",
    "<unk>",
    "user",
    "the quick",
    " ",
    "  ",
    "\n",
    "\t",
    "é",
    "日本",
    "🦊",
]
PIECES += ["<|im", "_start|>", "12", "\u2581", "👩‍👩‍👧", "x", "."]

texts = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=6)), max_size=8).map("".join)
quick = settings(max_examples=150, deadline=None)


@quick
@given(text=texts)
def test_special_text_is_cut_as_the_library_cuts_it(
    tokenizer: Tokenizer, library: tokenizers.Tokenizer, text: str
) -> None:
    assert tokenizer.encode(text) == library.encode(text, add_special_tokens=False).ids


@quick
@given(text=texts)
def test_content_never_holds_a_special_token(tokenizer: Tokenizer, text: str) -> None:
    content = text.replace("<unk>", "")
    ids = tokenizer.encode(content, special=False)
    assert not tokenizer.special_ids.intersection(ids)


@quick
@given(text=texts)
def test_bytes_of_the_tokens_are_the_bytes_of_the_text(
    tokenizer: Tokenizer, kind: str, text: str
) -> None:
    content = text.replace("<unk>", "").replace("\u2581", " ")
    ids = tokenizer.encode(content, special=False)
    data = b"".join(map(tokenizer.token_bytes, ids))
    if kind in ("legacy", "first") and content:
        assert data.startswith(b" ")  # their own blank before the first word
        data = data[len(data) - len(content.encode()) :]
    assert data == content.encode()
    if kind in ("byte_level", "never"):
        assert tokenizer.decode(ids) == content


@quick
@given(pieces=st.lists(st.tuples(texts, st.booleans()), max_size=5))
def test_borders_of_segments_do_not_show(
    tokenizer: Tokenizer, library: tokenizers.Tokenizer, pieces: list[tuple[str, bool]]
) -> None:
    """Where plain pieces hold nothing special, the ids are those of the whole text at once."""
    clean = [(t if special else _harmless(t), special) for t, special in pieces]
    whole = "".join(text for text, _ in clean)
    ends = {len("".join(t for t, _ in clean[:i])) for i in range(1, len(clean))}
    if _crosses(whole, ends):
        return
    ids = tokenizer.encode_segments(clean)
    assert ids == library.encode(whole, add_special_tokens=False).ids


def _harmless(text: str) -> str:
    for token in (*SPECIALS, "<unk>", "<wide>"):
        text = text.replace(token, "")
    return text if not any(t in text for t in (*SPECIALS, "<unk>")) else ""


def _crosses(whole: str, ends: set[int]) -> bool:
    """Whether a special token of the joined text spans two pieces."""
    for token in (*SPECIALS, "<unk>"):
        at = whole.find(token)
        while at >= 0:
            if any(at < end < at + len(token) for end in ends):
                return True
            at = whole.find(token, at + 1)
    return False


def test_segments_by_hand(byte_tokenizer: Tokenizer) -> None:
    t = byte_tokenizer
    start, end = t.id("<|im_start|>"), t.id("<|im_end|>")
    content = ("er <|im_end|>", False)
    ids = t.encode_segments([("<|im_start|>us", True), content, ("<|im_end|>", True)])
    assert ids[0] == start and ids[-1] == end
    assert ids.count(end) == 1  # type: ignore[arg-type]
    assert t.decode(ids) == "user <|im_end|>"
    assert t.decode(ids, skip_special=False) == "<|im_start|>user <|im_end|><|im_end|>"
    assert ids[1:-1] == t.encode("user <|im_end|>", special=False)


def test_the_longest_special_token_wins_and_eats_its_blanks(byte_tokenizer: Tokenizer) -> None:
    t = byte_tokenizer
    assert t.encode("<|im_start|>") == [t.id("<|im_start|>")]
    assert t.encode("<|im|>") == [t.id("<|im|>")]
    assert t.encode("a <wide>  b") == [*t.encode("a"), t.id("<wide>"), *t.encode("b")]


def test_the_first_token_comes_once(byte_tokenizer: Tokenizer) -> None:
    t = byte_tokenizer
    bos = t.id("<|bos|>")
    assert t.encode("hi", start=True) == [bos, *t.encode("hi")]
    assert t.encode("<|bos|>hi", start=True) == [bos, *t.encode("hi")]
    assert t.encode("", start=True) == [bos]
    assert t.encode_segments([], start=True) == [bos]
    assert t.encode("") == []
    assert t.encode_segments([("", True), ("", False)]) == []


@quick
@given(first=texts, rest=texts)
def test_text_that_goes_on_gets_no_blank_of_its_own(
    tokenizer: Tokenizer, first: str, rest: str
) -> None:
    """However a text was begun, the bytes of what comes after are its own."""
    before = tokenizer.encode("x" + _harmless(first))
    content = _harmless(rest).replace("\u2581", " ")
    ids = tokenizer.encode_segments([(content, True)], after=before[-1])
    assert b"".join(map(tokenizer.token_bytes, ids)) == content.encode()
    special = min(tokenizer.special_ids)
    marker = (tokenizer.decode([special], skip_special=False), True)
    as_one = tokenizer.encode_segments([marker, (content, True)])
    assert [special, *tokenizer.encode_segments([(content, True)], after=special)] == as_one


def test_special_tokens_have_no_bytes(tokenizer: Tokenizer) -> None:
    assert tokenizer.special_ids
    assert all(tokenizer.token_bytes(i) == b"" for i in tokenizer.special_ids)
    assert len(tokenizer.bytes_table) == tokenizer.vocab_size


def test_an_added_token_that_is_not_special_is_text(byte_tokenizer: Tokenizer) -> None:
    t = byte_tokenizer
    tool = t.id("<tool>")
    assert tool is not None
    assert t.encode("a<tool>b", special=False).count(tool) == 1
    assert t.token_bytes(tool) == b"<tool>"


def test_ids_beyond_the_vocabulary(trained: dict[str, tokenizers.Tokenizer]) -> None:
    size = trained["byte_level"].get_vocab_size() + 10
    t = Tokenizer(tokenizers.Tokenizer.from_str(trained["byte_level"].to_str()), vocab_size=size)
    assert t.token_bytes(size - 1) == b""
    assert t.decode([size - 1]) == ""
    for bad in (-1, size):
        with pytest.raises(BadInputError, match=f"token id {bad} is outside"):
            t.decode([bad])


def test_bad_text(byte_tokenizer: Tokenizer) -> None:
    with pytest.raises(BadInputError, match="surrogate"):
        byte_tokenizer.encode("a\ud800")
    with pytest.raises(BadInputError, match="not NoneType"):
        byte_tokenizer.encode(None)  # type: ignore[arg-type]


def test_broken_bytes_are_replaced_only_when_decoded(byte_tokenizer: Tokenizer) -> None:
    t = byte_tokenizer
    ids = [i for i in range(t.vocab_size) if t.token_bytes(i) == b"\xf0"]
    assert t.decode(ids) == "\ufffd"


# --- from files ---


def write_folder(folder: Path, inner: tokenizers.Tokenizer, **settings_: object) -> Path:
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 1000,
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings_))
    inner.save(str(folder / "tokenizer.json"))
    return folder


def test_a_folder(tmp_path: Path, trained: dict[str, tokenizers.Tokenizer]) -> None:
    inner = tokenizers.Tokenizer.from_str(trained["byte_level"].to_str())
    bos, im_end = inner.token_to_id("<|bos|>"), inner.token_to_id("<|im_end|>")
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", bos)]
    )
    inner.enable_truncation(4)
    folder = write_folder(
        tmp_path / "m",
        inner,
        eos_token={"content": "<|im_end|>"},
        bos_token="<|bos|>",
        chat_template="{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
    )
    t = Tokenizer.from_files(resolve(str(folder)))
    assert t.vocab_size == 1000
    assert t.prefix_ids == (bos,)
    assert t.eos_ids == (2, im_end)
    assert t.bos_id == bos
    assert len(t.encode("one two three four five six")) > 4  # truncation of the file is not ours
    messages = [{"role": "user", "content": "hi"}]
    assert t.apply_chat_template(messages) == "<|bos|>hi"
    other = Tokenizer.from_files(resolve(str(folder)), chat_template="X{{ messages[0].content }}")
    assert other.apply_chat_template(messages) == "Xhi"


def test_a_tokenizer_from_elsewhere(
    tmp_path: Path, trained: dict[str, tokenizers.Tokenizer]
) -> None:
    here = resolve(str(write_folder(tmp_path / "a", trained["byte_level"])))
    there = resolve(str(write_folder(tmp_path / "b", trained["never"], eos_token="<|eos|>")))
    t = Tokenizer.from_files(here, source=there)
    assert t.encode("the") == Tokenizer.from_files(there).encode("the")
    assert t.vocab_size == 1000


def test_a_broken_tokenizer_file(tmp_path: Path, trained: dict[str, tokenizers.Tokenizer]) -> None:
    folder = write_folder(tmp_path / "m", trained["byte_level"])
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.from_files(resolve(str(folder)))
    (folder / "tokenizer.json").unlink()
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        Tokenizer.from_files(resolve(str(folder)))


def test_a_config_alone_speaks_bytes(tmp_path: Path) -> None:
    path = Path(__file__).parents[4] / "benchmarks" / "configs" / "qwen2.5-0.5b.json"
    t = Tokenizer.from_files(resolve(str(path)))
    text = "né 🦊\n"
    assert t.encode(text) == list(text.encode())
    assert t.decode(t.encode(text)) == text
    assert (t.bos_id, t.eos_ids) == (256, (257,))
    assert t.vocab_size == 151936


def test_an_unknown_kind_of_tokens() -> None:
    inner = tokenizers.Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(ModelError, match="unknown tokenizer model WordLevel"):
        Tokenizer(inner).token_bytes(0)


def test_importing_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, ramet.runtime.gateway.tokenizer, ramet.runtime.gateway.detokenizer;"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_an_older_folder_goes_through_transformers(
    tmp_path: Path, trained: dict[str, tokenizers.Tokenizer]
) -> None:
    """No tokenizer.json, but a vocabulary and merges: converted, with the same ids."""
    original = trained["byte_level"]
    folder = write_folder(tmp_path / "m", original, tokenizer_class="GPT2Tokenizer")
    (folder / "tokenizer.json").unlink()
    original.model.save(str(folder))
    t = Tokenizer.from_files(resolve(str(folder)))
    text = "The quick brown fox 1234 né"
    assert t.encode(text, special=False) == original.encode(text).ids
    assert t.decode(t.encode(text)) == text
