"""Requests whose output begins with the end of their prompt, in the engine's loop."""

from __future__ import annotations

import random

import pytest
from ramet.runtime.engine.submission import MAX_HEAL_BYTES
from ramet.runtime.grammar import Compiler, Vocabulary
from ramet.runtime.grammar.prefix_matcher import PrefixGrammar
from ramet.runtime.protocol.messages import Abort
from ramet.runtime.protocol.sampling import Constraint

TABLE = [bytes([97 + i]) for i in range(20)] + [b"ab", b"abc", b"bc", b"bca", b"cab", b""]
A, B, C, AB, ABC, BC, BCA = 0, 1, 2, 20, 21, 22, 23
SPECIAL = 25
GRAMMAR = PrefixGrammar(Vocabulary(TABLE))


@pytest.fixture
def token_bytes():
    return TABLE


def text_of(tokens):
    return b"".join(TABLE[token] for token in tokens)


def should(follow, prompt, prefix, new, context=256):
    """What comes: the simulated model's tokens, or the next in the alphabet that may come."""
    state, tokens, matcher = 0, [], GRAMMAR.matcher(prefix)
    for token in prompt:
        state = follow(state, token)
    counted = 0
    while counted < new and len(prompt) + len(tokens) < context:
        token = (state >> 7) % 26
        while matcher.rest and not matcher.fork().accept(token):
            token = (token + 1) % 26
        left = len(matcher.rest)
        assert matcher.accept(token)
        counted += len(TABLE[token]) > left or not left
        tokens.append(token)
        state = follow(state, token)
    return tokens


@pytest.fixture
def simulated(simulated_follow):
    return lambda *args, **more: should(simulated_follow, *args, **more)


def test_an_output_begins_with_the_bytes_and_has_as_many_tokens_after_them(started, simulated):
    engine, connect = started
    client = connect()
    draw = random.Random(3)
    for rid in range(30):
        prompt = [draw.randrange(26) for _ in range(draw.randrange(1, 9))]
        prefix = bytes(draw.choice(b"abcabcd") for _ in range(draw.randrange(1, 6)))
        new = draw.randrange(1, 7)
        tokens = client.run(rid, prompt, new, heal=prefix)
        assert tokens == simulated(prompt, prefix, new)
        assert text_of(tokens).startswith(prefix)
        assert client.finished[rid].reason == "length"
    assert client.ask(1, "info").data["pages"]["held"] == 0
    guides = engine._guided.guides
    assert not guides._guides
    assert not guides._pending


def test_many_at_once_are_as_if_alone(started, simulated):
    """More than there are rows, and healed ones beside others."""
    _, connect = started
    client = connect()
    draw = random.Random(4)
    asks = {}
    for rid in range(24):
        prompt = [draw.randrange(26) for _ in range(draw.randrange(1, 9))]
        prefix = bytes(draw.choice(b"abc") for _ in range(draw.randrange(0, 4)))
        asks[rid] = prompt, prefix, draw.randrange(1, 9)
        client.submit(rid, prompt, asks[rid][2], heal=prefix)
    client.pump(lambda: len(client.finished) == len(asks), 30)
    for rid, ask in asks.items():
        assert client.tokens[rid] == simulated(*ask)
    assert client.ask(1, "info").data["pages"]["held"] == 0


def test_memory_that_runs_out_changes_nothing(started, simulated):
    """Also where a request is retracted while it heals."""
    engine, connect = started
    client = connect()
    asks = {rid: ([rid, 1, 2] * 30, b"abcabcabcabcabcabc"[: 6 + rid], 40) for rid in range(8)}
    for rid, (prompt, prefix, new) in asks.items():
        held = {"constraint": Constraint("ebnf", "h abcdefghij*")} if rid % 2 else {}
        client.submit(rid, prompt, new, heal=prefix, **held)
    client.pump(lambda: len(client.finished) == len(asks), 30)
    for rid, (prompt, prefix, new) in asks.items():
        if rid % 2:
            text = text_of(client.tokens[rid])
            assert text.startswith(prefix + b"h")
            assert len(text) == len(prefix) + new  # all of its tokens are letters
        else:
            assert client.tokens[rid] == simulated(prompt, prefix, new)
    assert engine.scheduler.num_retracted
    assert engine.scheduler.memory.usage().held == 0


def test_no_mask_is_made_any_more_once_it_has_healed(started):
    engine, connect = started
    client = connect()
    filled = []
    guides = engine._guided.guides
    masks = guides.masks
    guides.masks = lambda planned, rows, out: (
        filled.append(len(out)),
        masks(planned, rows, out),
    )[1]
    tokens = client.run(1, [1, 2, 3], 40, heal=b"ab")
    assert len(filled) <= 2 + 1  # one more may be planned already
    assert len(tokens) >= 40
    client.run(2, [1, 2, 3], 40)
    assert len(filled) <= 2 + 1


# --- what ends it ---------------------------------------------------------------------------------


def find(simulated, wanted, prefix=b"ab"):
    """A prompt after which the model begins like this."""
    for first in range(26):
        for second in range(26):
            for third in range(26):
                if simulated([first, second, third], prefix, 4)[: len(wanted)] == wanted:
                    return [first, second, third]
    raise AssertionError(f"no prompt is followed by {wanted}")


def test_a_stop_id_ends_nothing_before_the_prompt_is_whole(started, simulated):
    _, connect = started
    client = connect()
    prompt = find(simulated, [AB])
    want = simulated(prompt, b"ab", 4)
    tokens = client.run(1, prompt, 4, heal=b"ab", stop_ids=(AB, A, B))
    assert tokens == want[: len(tokens)]
    assert len(tokens) > 1
    spanning = find(simulated, [ABC])
    assert client.run(2, spanning, 4, heal=b"ab", stop_ids=(ABC,)) == [ABC]
    finish = client.finished[2]
    assert (finish.reason, finish.matched, finish.text_bytes) == ("stop", ABC, -1)
    assert client.run(3, spanning, 4, heal=b"ab", stop_ids=(ABC,), min_new_tokens=1) != [ABC]


def test_a_stop_string_is_looked_for_after_the_prefix(started, simulated):
    _, connect = started
    client = connect()
    spanning = find(simulated, [ABC])
    assert client.run(1, spanning, 4, heal=b"ab", stops=(b"c",)) == [ABC]
    finish = client.finished[1]
    assert (finish.reason, finish.matched, finish.text_bytes) == ("stop", b"c", 0)
    want = simulated(spanning, b"ab", 4)
    assert client.run(2, spanning, 4, heal=b"ab", stops=(b"bc", b"ab", b"a")) == want or (
        client.finished[2].text_bytes > 0
    )
    prompt = find(simulated, [AB])
    want = simulated(prompt, b"ab", 9)
    after = text_of(want)[2:]
    stop = after[3:5]
    client.run(3, prompt, 9, heal=b"ab", stops=(stop,))
    assert client.finished[3].text_bytes == after.index(stop)


def test_the_context_is_the_end_also_inside(started, simulated):
    _, connect = started
    client = connect()
    prompt = [1] * 254
    tokens = client.run(1, prompt, 2, heal=b"jjjj")
    assert text_of(tokens) == b"jj"
    assert client.finished[1].reason == "length"
    assert tokens == simulated(prompt, b"jjjj", 2)
    tokens = client.run(2, [1] * 250, 4, heal=b"jjjj")
    assert len(tokens) == 6
    assert text_of(tokens).startswith(b"jjjj")


@pytest.mark.parametrize("jump", [True, False])
def test_a_grammar_goes_on_where_the_prefix_ends(started, jump):
    _, connect = started
    client = connect()
    spec = Constraint("ebnf", "c def g h i")
    more = {"constraint": spec, "jump_forward": jump, "heal": b"ab"}
    tokens = client.run(1, [1, 2], 9, **more)
    text = text_of(tokens).decode()
    assert text[:3] == "abc"
    assert text[4:] == "ghi"
    assert client.finished[1].reason == "stop"
    assert len(client.run(2, [1, 2], 2, **more)) == 4
    assert client.finished[2].reason == "length"
    assert text_of(client.run(3, [1, 2], 9, **more, stops=(b"h", b"ab"))).decode()[:3] == "abc"
    assert client.finished[3].text_bytes == 3
    assert text_of(client.run(4, [1, 2], 9, **more, stop_ids=(A, B))) == text.encode()
    info = client.ask(1, "info").data
    assert info["pages"]["held"] == 0
    assert (info["forced_tokens"] > 0) == jump


def test_thinking_comes_between_the_prefix_and_the_grammar(started):
    _, connect = started
    client = connect()
    spec = Constraint("ebnf", "r s t", after="d")
    tokens = client.run(1, [1, 2], 200, constraint=spec, heal=b"abd")
    text = text_of(tokens).decode()
    assert text.startswith("abd")
    assert "d" in text[3:]
    assert text.endswith("rst") or client.finished[1].reason == "length"


# --- what goes wrong ------------------------------------------------------------------------------


def test_what_cannot_be_written_again_fails_alone(started):
    engine, connect = started
    client = connect()
    for rid, heal in enumerate([b"AB", b"\xff", b"a" * (MAX_HEAL_BYTES + 1)]):
        client.run(rid, [1, 2, 3], 4, heal=heal)
        assert client.finished[rid].error is not None
    client.run(3, [1, 2, 3], 4, heal=b"a\xff", constraint=Constraint("ebnf", "a"))
    assert client.finished[0].error.kind == client.finished[1].error.kind == "grammar"
    assert client.finished[2].error.param == client.finished[3].error.param == "heal"
    assert "inside of a character" in client.finished[3].error.message
    engine._guided.guides._prefixes = None
    client.run(8, [1, 2, 3], 4, heal=b"a")
    assert client.finished[8].error.kind == "grammar"
    assert len(client.run(9, [1, 2, 3], 4)) == 4
    assert client.ask(1, "info").data["pages"]["held"] == 0


def test_one_that_is_aborted_while_it_heals_leaves_nothing(started):
    engine, connect = started
    client = connect()
    for rid in range(12):
        client.submit(rid, [rid, 2, 3], 150, heal=b"abcj" * 5)
        client.send(Abort(rids=[rid]))
    client.pump(lambda: len(client.finished) == 12)
    info = client.ask(1, "info").data
    assert info["pages"]["held"] == 0
    assert info["requests"] == {"running": 0, "waiting": 0}
    assert not engine._guided.guides._guides
    assert not engine._guided.guides._pending


RUNS_ON = [*(bytes([97 + i]) for i in range(20)), b"abccccccd", b"ccc", b"", b"", b"", b""]


@pytest.mark.parametrize("token_bytes", [RUNS_ON])
def test_what_is_forced_behind_half_a_prefix_ends_with_the_context(
    started, letters, expected, token_bytes
):
    _, connect = started
    compiler = Compiler(Vocabulary(token_bytes))
    letters.submit = compiler.submit
    try:
        client = connect()
        # The model takes "a" where "abccccccd" may come too: "b ccc ccc" must follow.
        start = next(i for i in range(26) if expected([i] * 254, 1, 26)[0] > 20)
        asked = Constraint("regex", "cccccc[de]")
        tokens = client.run(1, [start] * 254, 2, heal=b"ab", constraint=asked)
        assert tokens == [0, 1]
        assert client.finished[1].reason == "length"
        assert len(client.run(2, [1], 4)) == 4
    finally:
        compiler.close()
