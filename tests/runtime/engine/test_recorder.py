"""The recorder beside the engine: what it writes, and that the engine never waits for it."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
from ramet.runtime.engine import recorder as module
from ramet.runtime.engine.recorder import Recorder, TokenHashes
from ramet.runtime.engine.trace_file import MAGIC, RECENT, Seen, read_trace
from ramet.runtime.protocol import BadInputError
from ramet.runtime.protocol.messages import EngineSampling
from ramet.runtime.scheduler.request import Request


def ended(tokens, prompt_len=None, **more):
    tokens = np.asarray(tokens, np.int32)
    request = Request(
        1, b"gateway", EngineSampling(max_new_tokens=4), tokens, prompt_len or len(tokens), **more
    )
    request.arrival = request.admitted = time.monotonic()
    return request


def start(path):
    return Recorder(str(path), slots=64, eviction="lru", policy="fcfs")


def entries(path):
    return [one for one in read_trace(path) if isinstance(one, Seen)]


def test_hashes_are_equal_as_far_as_tokens_are():
    hashes = TokenHashes()
    dice = np.random.default_rng(0)
    a = dice.integers(0, 50_000, 500).astype(np.int32)
    b = a.copy()
    b[200] += 1
    one, two = hashes.of(a, b""), hashes.of(b, b"")
    assert (one[:200] == two[:200]).all()
    assert (one[200:] == two[200:]).mean() < 0.05
    assert (hashes.of(a, b"another") == one).mean() < 0.05
    assert (TokenHashes().of(a, b"") == one).mean() < 0.05
    assert len(np.unique(hashes.of(np.full(500, 7, np.int32), b""))) > 450, "places count"


def test_requests_are_written_with_what_they_share(tmp_path):
    path = tmp_path / "trace"
    recorder = start(path)
    stem = list(range(100))
    recorder.ended(ended([*stem, 7, 8, 9], 102, program=5, remaining=3, keep=1), counted=True)
    recorder.ended(ended([*stem, 7, 5], program=6), counted=False)
    recorder.ended(ended([1, 2]), counted=True)
    recorder.close()
    first, second, third = entries(path)
    assert (first.entry.prompt, first.entry.most, len(first.hashes)) == (102, 101, 103)
    assert (first.entry.program, first.entry.remaining, first.entry.keep) == (1, 3, True)
    assert (second.entry.program, second.entry.counted) == (2, False)
    assert (second.entry.back, second.entry.common, len(second.entry.rest)) == (1, 101, 2)
    assert (first.hashes[:101] == second.hashes[:101]).all()
    assert first.hashes[101] != second.hashes[101]
    assert (third.entry.program, third.entry.back, len(third.hashes)) == (0, 0, 2)


def test_what_is_long_ago_is_not_referred_to(tmp_path):
    path = tmp_path / "trace"
    recorder = start(path)
    stem = list(range(40))
    recorder.ended(ended(stem), counted=True)
    for number in range(RECENT + 3):
        recorder.ended(ended([1000 + number] * 40), counted=True)
    recorder.ended(ended(stem), counted=True)
    recorder.close()
    found = entries(path)
    assert len(found) == RECENT + 5
    assert found[-1].entry.back == 0
    assert (found[-1].hashes == found[0].hashes).all()


def test_what_comes_too_fast_is_left_out_and_counted(tmp_path, monkeypatch):
    path = tmp_path / "trace"
    monkeypatch.setattr(module, "MOST_WAITING_TOKENS", 100)
    entry = Recorder._entry

    def slow(self, noted):
        time.sleep(0.2)
        return entry(self, noted)

    monkeypatch.setattr(Recorder, "_entry", slow)
    recorder = start(path)
    began = time.monotonic()
    for _ in range(50):
        recorder.ended(ended(range(40)), counted=True)
    assert time.monotonic() - began < 0.15, "the engine waited"
    time.sleep(0.7)
    recorder.ended(ended(range(40)), counted=True)
    recorder.close()
    found = entries(path)
    assert len(found) + sum(one.entry.lost for one in found) == 51
    assert found[-1].entry.lost >= 40


def test_one_that_was_never_let_in_is_not_there(tmp_path):
    recorder = start(tmp_path / "trace")
    request = ended([1, 2, 3])
    request.admitted = 0.0
    recorder.ended(request, counted=False)
    recorder.close()
    assert entries(tmp_path / "trace") == []


def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(module, "MOST_BYTES", 200)
    recorder = start(tmp_path / "trace")
    for number in range(50):
        recorder.ended(ended([number] * 40), counted=True)
    recorder.close()
    assert "no more is recorded" in caplog.text
    recorder.ended(ended([1]), counted=True)
    recorder.close()


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(BadInputError, match=r"record_trace: .*gone"):
        start(tmp_path / "gone" / "trace")
    (tmp_path / "other").write_text("something else")
    with pytest.raises(BadInputError, match="is there already"):
        start(tmp_path / "other")


def test_what_is_no_recording_is_refused_and_stays_as_it_is(tmp_path):
    other = tmp_path / "other"
    other.write_text("something else")
    other.chmod(0o644)
    (tmp_path / "link").symlink_to(other)
    os.mkfifo(tmp_path / "pipe", 0o644)
    for name, says in {
        "other": "is there already", "link": "is a link", "pipe": "is no file", "": "directory",
    }.items():  # fmt: skip
        with pytest.raises(BadInputError, match=says):
            start(tmp_path / name)
    assert other.read_text() == "something else"
    assert {path.stat().st_mode & 0o777 for path in (other, tmp_path / "pipe")} == {0o644}
    with pytest.raises(BadInputError, match="record_trace: -: is no file"):
        start("-")


def test_two_do_not_write_to_one_file(tmp_path):
    first = start(tmp_path / "trace")
    with pytest.raises(BadInputError, match="another engine"):
        start(tmp_path / "trace")
    first.close()
    start(tmp_path / "trace").close()


@pytest.mark.parametrize("cut", [1, 3, 40, 90])
def test_what_a_dead_engine_half_wrote_is_not_taken_for_what_follows(tmp_path, cut):
    path = tmp_path / "trace"
    for tokens in (range(40), range(50, 90), range(100, 140)):
        recorder = start(path)
        recorder.ended(ended(tokens), counted=True)
        recorder.close()
        whole = entries(path)
        os.truncate(path, path.stat().st_size - cut)
    assert len(whole) == 1, "those that were cut have gone, the last is there"
    assert len(whole[0].hashes) == 40


def test_a_damaged_recording_is_not_gone_on_with(tmp_path):
    path = tmp_path / "trace"
    start(path).close()
    path.write_bytes(path.read_bytes() + b"\xff" * 100)
    before = path.read_bytes()
    with pytest.raises(BadInputError, match="is damaged at byte"):
        start(path)
    assert path.read_bytes() == before


def test_a_disk_that_was_full_at_once_leaves_a_beginning_that_is_gone_on_with(tmp_path):
    path = tmp_path / "trace"
    path.write_bytes(MAGIC[:5])
    recorder = start(path)
    recorder.ended(ended([1, 2]), counted=True)
    recorder.close()
    assert len(entries(path)) == 1
