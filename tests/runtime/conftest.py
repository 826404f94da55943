"""A runner that has no model but knows what every slot must hold."""

from __future__ import annotations

import threading
import zlib

import numpy as np
import pytest
from ramet.runtime.memory.block_chain import BLOCK
from ramet.runtime.memory.kv_memory import KVMemory
from ramet.runtime.protocol.messages import EngineSampling
from ramet.runtime.protocol.trie import Trie
from ramet.runtime.scheduler.batch import FROM_DEVICE, PositionLogprobs, StepBatch, StepResult
from ramet.runtime.scheduler.classes import CLASSES
from ramet.runtime.scheduler.request import Request
from ramet.runtime.scheduler.scheduler import Limits, MustDrain, Scheduler
from ramet.runtime.scheduler.trie import trie_of


def follow(state: int, token: int) -> int:
    """What the KV of a token stands for: the whole prefix, as a checksum."""
    return zlib.crc32(int(token).to_bytes(4, "little"), state) or 1


def next_token(state: int, vocab: int) -> int:
    return (state >> 7) % vocab


def expected_output(prompt, count: int, vocab: int) -> list[int]:
    state = 0
    for token in prompt:
        state = follow(state, int(token))
    out = []
    for _ in range(count):
        token = next_token(state, vocab)
        out.append(token)
        state = follow(state, token)
    return out


def trie_logprob(state: int, token: int) -> float:
    """Of a token after a prefix with this checksum."""
    return -(follow(state, token) % 997) / 100


def place_before(trie, position: int) -> int:
    """Where the token lies that comes before the one at ``position`` in its text; -1: none does."""
    node = position - trie.start if trie is not None else -1
    if node < 0:
        return position - 1
    above = [i for i in range(node) if trie.depths[i] == trie.depths[node] - 1]
    parent = above[-1] if above else -1
    assert parent < 0 or trie.ends[parent] > node, "an ancestor whose descendants end before it"
    return trie.start + parent


class SimulatedRunner:
    """Writes checksums of prefixes as KV; fails when a row's table leads to anything else."""

    def __init__(self, num_slots: int, page_size: int, rows: int, context: int, vocab: int) -> None:
        self.kv = np.zeros(num_slots + page_size, np.int64)
        self.table = np.zeros((rows, context), np.int64)
        self.last = np.zeros(rows, np.int64)
        self.vocab_size = vocab
        self.computed = 0

    def launch(self, batch: StepBatch) -> StepResult:
        assert len(batch.ids) == batch.q_lens.sum() == len(batch.slots)
        assert len(set(batch.rows.tolist())) == len(batch.rows)
        written = batch.slots[batch.slots > 0]
        assert len(set(written.tolist())) == len(written), "two tokens for one slot"
        for new in batch.new_rows:
            if not new.goes_on:
                self.table[new.row] = -1
                self.table[new.row, : len(new.slots)] = new.slots
            assert new.row in batch.rows, "told of before its first step"
        at = 0
        spans = []
        for row, q, kv in zip(batch.rows.tolist(), batch.q_lens.tolist(), batch.kv_lens.tolist()):
            self.table[row, kv - q : kv] = batch.slots[at : at + q]
            spans.append((row, kv - q, kv, at))
            at += q
        for row, slots in batch.moves:
            self.table[row, : len(slots)] = slots
        states = {}
        tokens_of = {}
        # Depth by depth, as layers do: what a step writes may be read by the same step.
        pending = sorted(spans, key=lambda s: s[1])
        tries = {int(batch.rows[trie.item]): trie for trie in batch.tries}

        mine = {}

        def before(row: int, position: int) -> int:
            place = place_before(tries.get(row), position)
            if place < 0:
                return 0
            return mine.get((row, place)) or int(self.kv[self.table[row, place]])

        for row, start, end, at in pending:
            for position in range(start, end):
                state = before(row, position)
                token = int(batch.ids[at + position - start])
                if token == FROM_DEVICE:
                    token = int(self.last[row])
                state = follow(state, token)
                slot = int(batch.slots[at + position - start])
                if slot:
                    self.kv[slot] = state
                mine[row, position] = state
                tokens_of.setdefault(row, {})[position] = token
            states[row] = state
        for row, start, end, _ in spans:
            if end:
                assert self.kv[self.table[row, end - 1]] == states[row], "a row reads another's KV"
            for position in range(start, end):
                check = follow(before(row, position), tokens_of[row][position])
                assert self.kv[self.table[row, position]] == check, "KV at a wrong slot"
        self.computed += len(batch.ids)
        sampled = []
        for item in batch.samples.tolist():
            row = int(batch.rows[item])
            token = next_token(states[row], self.vocab_size)
            self.last[row] = token
            sampled.append(token)
        return StepResult(
            np.array(sampled, np.int32),
            np.zeros(len(sampled), np.bool_),
            prompt_logprobs=[
                PositionLogprobs(np.arange(first, last, dtype=np.float32))
                for _, first, last in batch.prompt_logprobs
            ],
            tries=[self.score(batch, trie) for trie in batch.tries],
        )

    def score(self, batch: StepBatch, trie) -> np.ndarray:
        row, q = int(batch.rows[trie.item]), int(batch.q_lens[trie.item])
        first = int(batch.kv_lens[trie.item]) - q
        assert len(trie.ends) == len(trie.depths) == max(first + q - trie.start, 0)
        assert (np.diff(trie.of) >= 0).all()
        assert (trie.heads < q).all()
        states = [int(self.kv[self.table[row, first + head]]) for head in trie.heads.tolist()]
        pairs = zip(trie.of.tolist(), trie.targets.tolist())
        return np.array([trie_logprob(states[of], token) for of, token in pairs], np.float32)


class World:
    """Scheduler, memory and simulated runner, stepped together (one step in flight if asked)."""

    def __init__(self, *, slots=2048, page=16, rows=8, context=512, vocab=50, overlap=False,
                 step_tokens=64, caching=True, eviction="lru", policy="fcfs",
                 prompt_sizes=(), tiers=None, classes=CLASSES, conservativeness=1.0):  # fmt: skip
        self.memory = KVMemory(slots, page, caching=caching, eviction=eviction, tiers=tiers)
        limits = Limits(max_rows=rows, context_length=context, step_tokens=step_tokens,
                        prompt_sizes=prompt_sizes, classes=classes)  # fmt: skip
        self.scheduler = Scheduler(
            limits, self.memory, policy=policy, conservativeness=conservativeness
        )
        self.runner = SimulatedRunner(self.memory.total, page, rows, context, vocab)
        self.vocab = vocab
        self.overlap = overlap
        self.flights: list = []
        self.done: dict[int, list[int]] = {}
        self.requests: dict[int, Request] = {}
        self.failed: dict[int, Exception] = {}
        self.scores: dict[int, list[float]] = {}
        self.trie_scores: dict[int, dict[int, float]] = {}
        self.force = None
        """From a row's output so far to tokens that must follow, as a grammar would say."""
        self.forced: dict[int, set[int]] = {}
        """By request, the places in its output that were forced."""

    def add_trie(self, rid: int, prompt, tokens, parents, **more) -> Request:
        """A request that scores a tree of tokens after its prompt."""
        message = Trie(
            tokens=np.array(tokens, np.int32).tobytes(),
            parents=np.array(parents, np.int32).tobytes(),
        )
        trie = trie_of(message, 1 << 20)
        ids = np.concatenate((np.array(prompt, np.int32), trie.nodes))
        sampling = EngineSampling(max_new_tokens=0)
        request = Request(rid, b"c", sampling, ids, len(prompt), trie=trie, **more)
        self.scheduler.add(request)
        self.requests[rid] = request
        return request

    def check_trie(self, rid: int, prompt, tokens, parents) -> None:
        """Every node was scored once or more, each time by the path that it follows."""
        order = sorted(range(len(tokens)), key=lambda i: parents[i])
        start = 0 if len(prompt) else sum(parent < 0 for parent in parents)
        want = []
        for node in order[start:]:
            path, at = [], parents[node]
            while at >= 0:
                path.append(tokens[at])
                at = parents[at]
            state = 0
            for token in [*prompt, *path[::-1]]:
                state = follow(state, int(token))
            want.append(trie_logprob(state, tokens[node]))
        got = self.trie_scores.get(rid, {})
        assert sorted(got) == list(range(start, len(tokens)))
        assert [got[i] for i in sorted(got)] == pytest.approx(want)

    def add(self, rid: int, prompt, new: int, *, program=0, remaining=0, cls="", then=None,
            **sampling) -> Request:  # fmt: skip
        tokens = np.array(prompt, np.int32)
        request = Request(rid, b"c", EngineSampling(max_new_tokens=new, **sampling), tokens,
                          len(tokens), program=program, remaining=remaining, cls=cls,
                          then=then)  # fmt: skip
        self.scheduler.add(request)
        self.requests[rid] = request
        return request

    def abort(self, rid: int) -> None:
        self.scheduler.remove(self.requests.pop(rid))

    def step(self) -> bool:
        scheduler = self.scheduler
        try:
            planned = scheduler.plan(drained=not self.flights)
        except MustDrain:
            planned = None
        if planned is not None:
            self.flights.append((planned, self.runner.launch(planned.batch)))
        for request, error in scheduler.failed:
            self.failed[request.rid] = error
            del self.requests[request.rid]
        scheduler.failed.clear()
        if self.flights and (planned is None or len(self.flights) > int(self.overlap)):
            self.land(*self.flights.pop(0))
        scheduler.assert_consistent()
        return planned is not None or bool(self.flights)

    def land(self, planned, result) -> None:
        rows = self.scheduler.rows
        for (request, start), found in zip(planned.scored, result.prompt_logprobs):
            have = self.scores.setdefault(request.rid, [])
            assert start == max(request.sampling.logprob_start, 1) + len(have)
            have.extend(found.values.tolist())
        for (request, start), values in zip(planned.tries, result.tries):
            have_nodes = self.trie_scores.setdefault(request.rid, {})
            have_nodes.update(zip(range(start, start + len(values)), values.tolist()))
        for i, (row, epoch) in enumerate(zip(planned.rows.tolist(), planned.epochs.tolist())):
            if rows.epoch[row] != epoch:
                continue
            request = rows.requests[row]
            token = int(result.tokens[i])
            rows.tokens[row, rows.known[row]] = token
            rows.known[row] += 1
            made = rows.known[row] - request.prompt_len
            if token in request.sampling.stop_ids or made >= rows.max_new[row]:
                self.finish(request)
            elif self.force is not None:
                self.append_forced(request, int(made))
        for request in planned.ended:
            if request.row >= 0:
                self.finish(request)

    def append_forced(self, request, made: int) -> None:
        rows, row = self.scheduler.rows, request.row
        output = rows.tokens[row, request.prompt_len : rows.known[row]].tolist()
        more = self.force(output)[: int(rows.max_new[row]) - made]
        if more and self.scheduler.append_forced(row, np.array(more, np.int32)):
            places = self.forced.setdefault(request.rid, set())
            places.update(range(made, made + len(more)))
            if made + len(more) >= rows.max_new[row]:
                self.finish(request)

    def check_forced(self, rid: int, prompt) -> None:
        """Every token that was not forced is what the model says after all those before it."""
        state = 0
        for token in prompt:
            state = follow(state, int(token))
        for place, token in enumerate(self.done[rid]):
            if place not in self.forced.get(rid, ()):
                assert token == next_token(state, self.vocab), (rid, place)
            state = follow(state, token)

    def finish(self, request) -> None:
        self.scheduler.remove(request)
        self.done[request.rid] = request.tokens[request.prompt_len :].tolist()
        del self.requests[request.rid]

    def run(self, limit=10_000) -> None:
        for _ in range(limit):
            if not self.step() and self.scheduler.idle:
                return
        raise AssertionError("never became idle")

    def check(self, rid: int, prompt, new: int, stops=()) -> None:
        want = expected_output(prompt, new, self.vocab)
        for i, token in enumerate(want):
            if token in stops:
                want = want[: i + 1]
                break
        assert self.done[rid] == want


class SlotCopy:
    """A copy that takes as many looks as its transfer says."""

    def __init__(self, transfer, work) -> None:
        self.transfer, self.work, self.looks = transfer, work, transfer.looks
        self.seconds = 0.0

    def ready(self) -> bool:
        self.looks -= 1
        if self.looks < 0:
            self.wait()
        return self.work is None

    def wait(self) -> None:
        self.transfer.run_until(self)


class SlotTransfer:
    """Moves what `SimulatedRunner` keeps in slots to rows and back, in order and some time
    later."""

    def __init__(self, num_rows: int, looks: int = 0) -> None:
        self.num_rows, self.looks = num_rows, looks
        self.block_bytes = BLOCK * 8
        self.rows = np.full((num_rows, BLOCK), -7, np.int64)
        self.kv = np.zeros(0, np.int64)
        self.copies: list[SlotCopy] = []
        self.lock = threading.RLock()
        self.saved = self.loaded = 0
        self.closed = False

    def row(self, row: int) -> memoryview:
        return self.rows[row].view(np.uint8).data

    def save(self, slots, rows) -> SlotCopy:
        assert slots.shape == (len(rows), BLOCK) and len(set(rows)) == len(rows)
        self.saved += len(rows)
        gathered = self.kv[slots]  # in the order of steps, at once
        return self._begin(lambda: self.rows.__setitem__(list(rows), gathered))

    def load(self, rows, slots, skip) -> SlotCopy:
        assert 0 <= skip < BLOCK and (len(rows) - 1) * BLOCK < len(slots) + skip
        assert len(slots) + skip <= len(rows) * BLOCK
        self.loaded += len(rows)
        self.kv[slots] = -1  # nobody may read these yet

        def work() -> None:
            self.kv[slots] = self.rows[list(rows)].reshape(-1)[skip : skip + len(slots)]

        return self._begin(work)

    def _begin(self, work) -> SlotCopy:
        with self.lock:
            copy = SlotCopy(self, work)
            self.copies.append(copy)
            if not self.looks:
                copy.wait()
            return copy

    def run_until(self, last: SlotCopy) -> None:
        with self.lock:
            while last.work is not None:
                copy = self.copies.pop(0)
                copy.work()
                copy.work = None

    def close(self) -> None:
        self.closed = True


@pytest.fixture(scope="session")
def slot_transfer():
    return SlotTransfer


@pytest.fixture(scope="session")
def make_world():
    return World


@pytest.fixture(scope="session")
def expected():
    return expected_output


@pytest.fixture(scope="session")
def simulated_logprob():
    """What the simulated runner says of a token after others, where it scores tries."""

    def value(before, token: int) -> float:
        state = 0
        for one in before:
            state = follow(state, int(one))
        return trie_logprob(state, token)

    return value


@pytest.fixture(scope="session")
def simulated_runner():
    return SimulatedRunner


@pytest.fixture(scope="session")
def simulated_follow():
    return follow
