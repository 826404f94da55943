"""An engine over a simulated runner and real sockets, and grammars that are lists of letters."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import zmq
from ramet.runtime.engine.connections import Connections
from ramet.runtime.engine.guides import Guides
from ramet.runtime.engine.healing import Prefixes
from ramet.runtime.engine.loop import Engine
from ramet.runtime.grammar import Vocabulary
from ramet.runtime.grammar.prefix_matcher import PrefixGrammar
from ramet.runtime.memory.kv_memory import KVMemory
from ramet.runtime.protocol import GrammarError
from ramet.runtime.protocol.codec import engine_codec, reply_codec
from ramet.runtime.protocol.messages import (
    Answer,
    Ask,
    Beat,
    Credit,
    EngineSampling,
    NeedTokens,
    StepOut,
    Submit,
)
from ramet.runtime.scheduler.scheduler import Limits, Scheduler

VOCAB = 26
TOKEN_BYTES = [bytes([97 + i]) for i in range(VOCAB)]


class Ticket:
    """Samples when it is asked for them; with masks, when these have come."""

    def __init__(self, runner, batch, result):
        self.runner, self.batch, self._result = runner, batch, result
        self.masked = not len(batch.masked)

    def ready(self):
        return self.masked

    def mask(self, rows, of):
        """A row that may not have its token takes the next one in the alphabet that it may."""
        assert not self.masked
        assert self.runner.launched is self, "another step was launched before this one sampled"
        assert of.shape == (len(self.batch.masked),) and set(of.tolist()) == {*range(len(rows))}
        for at, (word,) in zip(self.batch.masked.tolist(), rows[of].tolist()):
            row = int(self.batch.rows[self.batch.samples[at]])
            token = int(self._result.tokens[at])
            allowed = [t % VOCAB for t in range(token, token + VOCAB) if word >> t % VOCAB & 1]
            self._result.bad[at] |= not allowed
            self._result.tokens[at] = self.runner.inner.last[row] = (allowed or [0])[0]
            if self.batch.want_logprobs:
                self._result.logprobs[at] = -float(self._result.tokens[at])
        self.masked = True

    def result(self):
        assert self.masked
        return self._result


class FakeRunner:
    def __init__(self, inner, asynchronous, delay):
        self.inner, self.asynchronous, self.delay = inner, asynchronous, delay
        self.vocab_size = VOCAB
        self.nan_rows: set[int] = set()
        self.launched = None
        self.launches = 0

    def launch(self, batch):
        time.sleep(self.delay)
        self.launches += 1
        result = self.inner.launch(batch)
        for i, item in enumerate(batch.samples.tolist()):
            if int(batch.rows[item]) in self.nan_rows:
                result.bad[i] = True
        if batch.want_logprobs:
            result.logprobs = -result.tokens.astype(np.float32)
        self.launched = Ticket(self, batch, result)
        return self.launched

    def mask_rows(self, count):
        return np.full((count, 1), 0x55555555, np.int32)

    def close(self):
        pass


class Letters:
    """A matcher of places, each with the letters that may stand there: ``abc x xyz``. ``*`` at the
    end: the last place again and again. The letter ``-`` stands for a limit that is met there,
    ``!`` for a fault of the library."""

    def __init__(self, text, at=0):
        self.repeats = text.endswith("*")
        self.places = text.rstrip("*").split()
        self.at = at

    def here(self):
        if self.at < len(self.places):
            return self.places[self.at]
        return self.places[-1] if self.repeats else ""

    def fill(self, row):
        if "-" in self.here():
            raise GrammarError("a limit was met")
        if "!" in self.here():
            raise ZeroDivisionError
        assert self.here(), "asked for a mask at the end"
        row[0] = sum(1 << ord(letter) - 97 for letter in self.here() if letter != "0")

    def accept(self, token):
        if chr(97 + token) not in self.here():
            return False
        self.at += 1
        return True

    def passes(self, _token, _jumps):
        return False

    def row(self):
        return None

    def is_done(self):
        return self.at >= len(self.places) and not self.repeats

    def can_end(self):
        return self.at >= len(self.places)

    def forced_tokens(self, recent):
        text = "".join(TOKEN_BYTES[t].decode() for t in recent)
        assert self.repeats or all(a in b for a, b in zip(text[::-1], self.places[: self.at][::-1]))
        found = []
        for place in self.places[self.at :]:
            if len(place) > 1 or place in "0-!":
                break
            found.append(ord(place) - 97)
        return found


class LettersGrammar:
    kind, nbytes = "letters", 1

    def __init__(self, text):
        self.text = text

    def matcher(self):
        return Letters(self.text)


class LettersCompiler:
    """``slow`` specs wait until they are let go, ``bad`` ones fail."""

    def __init__(self):
        self.released = threading.Event()
        self.submitted = []
        self.cancelled = 0
        self.closed = False

    def submit(self, spec):
        self.submitted.append(spec.text)
        compiler = self

        class Pending:
            def done(self):
                return "slow" not in spec.text or compiler.released.is_set()

            def result(self):
                if "bad" in spec.text:
                    raise GrammarError("a bad spec", where="character 3")
                places = [*spec.prefix, spec.text.replace("slow", "")]
                return LettersGrammar(" ".join(places))

            def cancel(self):
                compiler.cancelled += 1

        return Pending()

    def close(self):
        self.closed = True


class Client:
    """What a gateway does, in thirty lines."""

    def __init__(self, context, address, credit=1000):
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.finished = {}
        self.need: list[int] = []
        self.answers = {}
        self.messages = 0
        self.beats = 0
        if credit:
            self.send(Credit(steps=credit))

    def send(self, message):
        self.socket.send(engine_codec.encode(message))

    def submit(self, rid, prompt, new=4, *, base=None, base_len=0, keep=None, **sampling):
        self.send(
            Submit(
                rid=rid,
                ids=np.array(prompt, np.int32).tobytes(),
                sampling=EngineSampling(max_new_tokens=new, **sampling),
                base=base,
                base_len=base_len,
                keep=keep,
            )
        )

    def pump(self, until, seconds=10.0):
        deadline = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < deadline, "nothing more comes"
            if self.socket.poll(50):
                self._take(reply_codec.decode(self.socket.recv()))

    def _take(self, message):
        match message:
            case StepOut():
                self.messages += 1
                logprobs = np.frombuffer(message.logprobs or b"", "<f4")
                rids = np.frombuffer(message.rids, "<i8").tolist()
                for i, (rid, token) in enumerate(
                    zip(rids, np.frombuffer(message.tokens, "<i4").tolist())
                ):
                    self.tokens.setdefault(rid, []).append(token)
                    if len(logprobs):
                        self.logprobs.setdefault(rid, []).append(float(logprobs[i]))
                for finish in message.finished:
                    self.finished[finish.rid] = finish
            case NeedTokens():
                self.need.append(message.rid)
            case Answer():
                self.answers[message.id] = message
            case Beat():
                self.beats += 1

    def run(self, rid, prompt, new=4, **more):
        self.submit(rid, prompt, new, **more)
        self.pump(lambda: rid in self.finished)
        return self.tokens.get(rid, [])

    def ask(self, number, op):
        self.send(Ask(id=number, op=op))
        self.pump(lambda: number in self.answers)
        return self.answers[number]


@pytest.fixture
def letters():
    return LettersCompiler()


@pytest.fixture(scope="session")
def fake_runner():
    return FakeRunner


@pytest.fixture(scope="session")
def client_class():
    return Client


@pytest.fixture
def token_bytes():
    """What the tokens are: letters, where a test says nothing else."""
    return TOKEN_BYTES


@pytest.fixture(params=[False, True], ids=["sync", "overlap"])
def started(request, tmp_path, simulated_runner, letters, token_bytes):
    address = f"ipc://{tmp_path}/engine"
    memory = KVMemory(512, 16)
    scheduler = Scheduler(Limits(max_rows=4, context_length=256, step_tokens=64), memory)
    runner = FakeRunner(simulated_runner(512, 16, 4, 256, VOCAB), request.param, 0.001)
    engine = Engine(
        runner,
        scheduler,
        Connections(address, memory.tree),
        token_bytes,
        guides=Guides(
            lambda: letters, (), prefixes=Prefixes(lambda: PrefixGrammar(Vocabulary(token_bytes)))
        ),
    )
    thread = threading.Thread(target=engine.run, daemon=True)
    thread.start()
    context = zmq.Context()
    clients: list[Client] = []

    def connect(**kw):
        clients.append(Client(context, address, **kw))
        return clients[-1]

    yield engine, connect
    engine.stop()
    thread.join(5)
    for client in clients:
        client.socket.close(0)
    context.term()
    scheduler.assert_consistent()
