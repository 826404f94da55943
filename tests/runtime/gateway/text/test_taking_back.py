"""Which tokens of a prompt are taken back for it to heal, and what becomes of their bytes."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ramet.runtime.gateway.detokenizer import Detokenizer
from ramet.runtime.gateway.healing import Healer, TakenBack, healed_tokens
from ramet.runtime.gateway.tokenizer import Tokenizer
from ramet.runtime.model import store
from ramet.runtime.protocol.kept import kept as kept_of
from ramet.runtime.protocol.messages import EngineSampling, Finish

WORDS = ["The capital", " of Fra", "http", ":", " ", "  \n", "é", "日本", "😀", "x", "12", "user"]
WORDS += ["<tool>", "<|im_end|>", " lazy", " fox jumps ov", "a<|eos|>b"]


def ids(tokens):
    return np.array(tokens, np.int32)


def spans(healer, data):
    """Whether one token begins with the bytes and goes on."""
    at = bisect_left(healer._sorted, data + b"\0")
    return at < len(healer._sorted) and healer._sorted[at].startswith(data)


@pytest.fixture(scope="module")
def any_healer(tokenizer):
    """Of each kind of tokenizer."""
    return tokenizer, Healer(tokenizer)


@settings(max_examples=300, deadline=None)
@given(words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=5))
def test_what_is_taken_back_is_as_far_as_a_token_could_span(any_healer, words):
    tokenizer, healer = any_healer
    text = "".join(words)
    prompt = ids(tokenizer.encode(text, start=True))
    back = healer.take_back(prompt)
    table = tokenizer.bytes_table
    assert back.prompt.tolist() == prompt[: len(prompt) - back.taken].tolist()
    taken = prompt[len(back.prompt) :].tolist()
    assert b"".join(table[token] for token in taken) == back.prefix
    assert len(back.prompt) >= 1
    assert tokenizer.special_ids.isdisjoint(taken)
    back.prefix.decode()  # whole characters
    if back.taken:
        # Some token can begin in the first of them and run past the end ...
        first = len(table[taken[0]])
        assert any(
            spans(healer, back.prefix[i:]) for i in range(len(back.prefix)) if i < first
        ) or not _begins_character(table, prompt, taken, healer)
    # ... and none before it, unless something stands in the way.
    kept, data = back.prompt.tolist(), back.prefix
    added = set(tokenizer.inner.get_added_tokens_decoder())
    while len(kept) > 1 and table[kept[-1]] and kept[-1] not in added:
        data = table[kept.pop()] + data
        if data[0] & 0xC0 != 0x80:  # a grammar cannot begin inside of a character
            assert not any(spans(healer, data[i:]) for i in range(len(data) - len(back.prefix)))


def _begins_character(table, prompt, taken, healer):
    """Whether the tokens were taken from where the spanning one is: not from further back, where a
    character begins."""
    later = b"".join(table[token] for token in taken[1:])
    return not later or later[0] & 0xC0 != 0x80 or not spans(healer, later)


@pytest.fixture(scope="module")
def smollm2():
    tokenizer = Tokenizer.from_files(store.resolve("smollm2-135m-instruct"))
    return tokenizer, Healer(tokenizer)


@pytest.mark.model
@pytest.mark.parametrize(
    ("text", "prefix"),
    [
        ("The capital of Fra", b" Fra"),
        ("The link is http:", b":"),
        ("To be, or not to be ", b" "),
        ("<|im_start|>assistant\n", b"\n"),
        ("<|im_start|>", b""),
        ("user<|im_end|>", b""),
        ("The", b""),
        ("Fran", b"ran"),
        ("", b""),
        (" a\n\n\n", b"\n\n\n"),
        ("x =      ", b"      "),
        ("naïve 日本", b""),
        ("the naïve caf", b" caf"),
        ("the naïve ca", b" ca"),
    ],
)
def test_of_smollm2(smollm2, text, prefix):
    tokenizer, healer = smollm2
    back = healer.take_back(ids(tokenizer.encode(text)))
    assert back.prefix.endswith(prefix)
    if len(text) > 20 or not prefix:
        assert back.prefix == prefix


@pytest.mark.model
def test_ids_may_end_inside_of_a_character(smollm2):
    tokenizer, healer = smollm2
    whole = tokenizer.encode("the naïve 日本語 😀 caf")
    table = tokenizer.bytes_table
    partial = 0
    for count in range(1, len(whole) + 1):
        back = healer.take_back(ids(whole[:count]))
        assert back.prefix == b"".join(table[token] for token in whole[:count][len(back.prompt) :])
        assert not back.prefix or back.prefix[0] & 0xC0 != 0x80
        partial += "\ufffd" in back.prefix.decode("utf-8", "replace")
    assert partial


@pytest.mark.model
def test_a_literal_is_not_left(smollm2):
    """Neither by its bytes nor by its tokens: what the program does not say again stays."""
    tokenizer, healer = smollm2
    prompt = ids(tokenizer.encode("The capital of Fra"))
    assert healer.take_back(prompt, 1, b" Fra").prefix == b" Fra"
    assert healer.take_back(prompt, 1, b"capital of Fra").prefix == b" Fra"
    for less in (b"Fra", b"ra", b"", b"else"):
        assert healer.take_back(prompt, 1, less) == TakenBack(prompt)
    assert healer.take_back(prompt, len(prompt) - 1, None).prefix == b" Fra"
    assert healer.take_back(prompt, len(prompt), None).taken == 0


def test_a_blank_of_the_tokenizer_s_own_goes_with_its_word(tokenizer):
    """Some put one before a text. It belongs to no literal, but the word's token holds it."""
    healer, table = Healer(tokenizer), tokenizer.bytes_table
    start = tokenizer.id("<|im_start|>")
    words = {data.decode("utf-8", "ignore").strip() for data in table if spans(healer, data)}
    words = [word for word in words if word and len(tokenizer.encode(word)) == 1]
    words = [word for word in words if spans(healer, table[tokenizer.encode(word)[0]])]
    assert words
    for word in words:
        prompt = ids([start, *tokenizer.encode(word)])
        shown, literal = table[prompt[1]], word.encode()
        assert shown.strip() == literal
        back = healer.take_back(prompt, 0, b" " + literal)
        assert (back.prompt.tolist(), back.prefix) == ([start], shown)
        assert healer.take_back(prompt, 0, literal).prefix in (b"", shown)


def test_an_added_token_is_taken_back_only_where_it_could_go_on(byte_tokenizer):
    """Not for what might begin inside of it: no tokenizer looks there."""
    healer = Healer(byte_tokenizer)
    prompt = ids(byte_tokenizer.encode("The <tool>"))
    last = byte_tokenizer.encode("<tool>")
    assert prompt[-1:].tolist() == last
    healer._sorted = sorted([*healer._sorted, b">x"])
    assert healer.take_back(prompt).taken == 0
    healer._sorted = sorted([*healer._sorted, b"<tool>s"])
    assert healer.take_back(prompt).prefix == b"<tool>"


def test_one_token_stays_whatever_is_asked(byte_tokenizer):
    healer = Healer(byte_tokenizer)
    letter = next(c for c in "abcdefghijklmnopqrstuvwxyz" if spans(healer, c.encode()))
    prompt = ids(byte_tokenizer.encode(letter))
    assert healer.take_back(prompt, 0) == TakenBack(prompt)
    assert healer.take_back(ids([*prompt, *prompt]), 0).prefix == letter.encode()


def test_what_the_engine_is_told():
    plain = EngineSampling(max_new_tokens=5, min_new_tokens=2)
    assert TakenBack(ids([1])).sampling(plain) is plain
    told = TakenBack(ids([1]), 2, b"xy").sampling(plain)
    assert (told.heal, told.max_new_tokens, told.min_new_tokens) == (b"xy", 5, 4)
    assert TakenBack(ids([1]), 2, b"xy").sampling(EngineSampling(max_new_tokens=5)) == (
        EngineSampling(max_new_tokens=5, heal=b"xy")
    )


# --- from the output on ---------------------------------------------------------------------------

TABLE = [b"a", b"b", b"ab", b"abc", b"\xc3", b"\xa9", b"\xa9b", b"c", b""]
A, B, AB, ABC, E1, E2, E2B, C, END = range(9)


@pytest.mark.parametrize(
    ("tokens", "prefix", "healed"),
    [
        ([A, B, C], b"ab", 2),
        ([AB, C], b"ab", 1),
        ([ABC], b"ab", 0),
        ([A], b"ab", 1),
        ([], b"ab", 0),
        ([AB, END], b"ab", 1),
        ([A, B], b"", 0),
    ],
)
def test_tokens_of_nothing_but_the_prefix(tokens, prefix, healed):
    assert healed_tokens(tokens, TABLE, len(prefix)) == healed


@pytest.mark.parametrize(
    ("tokens", "prefix", "finish", "kept", "carry"),
    [
        ([AB, C, C], b"ab", {}, 3, ""),
        ([AB, C, C], b"ab", {"matched": b"c", "text_bytes": 1}, 2, ""),
        ([AB, C], b"ab", {"matched": b"c", "text_bytes": 0}, 1, ""),
        ([ABC], b"ab", {"matched": b"c", "text_bytes": 0}, 0, "ab"),
        ([A, B, ABC], b"ab", {"matched": b"c", "text_bytes": 2}, 2, "ab"),
        ([ABC], b"ab", {"matched": ABC}, 0, "ab"),
        ([A, B, C], b"ab", {"matched": C}, 2, ""),
        ([A], b"ab", {"reason": "length"}, 1, "b"),
        ([], b"ab", {"reason": "abort"}, 0, "ab"),
        ([A, E1], "aé".encode(), {"reason": "length"}, 1, "é"),
        ([A, E1, E2B], "aé".encode(), {"matched": b"b", "text_bytes": 0}, 1, "é"),
        ([AB, C], b"", {"matched": C}, 1, ""),
        ([AB, C], b"", {"matched": b"bc", "text_bytes": 1}, 0, "a"),
    ],
)
def test_all_of_the_prefix_stays_in_the_stream(tokens, prefix, finish, kept, carry):
    end = Finish(rid=1, **{"reason": "stop", **finish})
    by_token = isinstance(end.matched, int)
    assert kept_of(tokens, by_token, end.text_bytes, TABLE, prefix) == (kept, carry.encode())
    if not isinstance(end.matched, int):
        text = b"".join(TABLE[token] for token in tokens[:kept]) + carry.encode()
        assert text.startswith(prefix)


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(st.sampled_from([A, B, AB, ABC, C]), max_size=12),
    skip=st.integers(0, 8),
    cuts=st.lists(st.integers(0, 12), max_size=4),
    stop=st.sampled_from([(), (b"bc",), (b"ca", b"b")]),
)
def test_the_first_bytes_are_no_text(tokens, skip, cuts, stop):
    """Nor is a stop string looked for in them, however the tokens come."""
    data = b"".join(TABLE[token] for token in tokens)[skip:]
    whole = Detokenizer([data], stops=stop)
    want = whole.push([0]) + whole.finish()
    text = Detokenizer(TABLE, stops=stop, skip_bytes=skip)
    got, at = "", 0
    for cut in [*sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]:
        got += text.push(tokens[at:cut])
        at = max(at, cut)
    assert got + text.finish() == want
