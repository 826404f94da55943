"""A fake engine that speaks the real messages, a byte-level tokenizer, clients of the service."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tokenizers
import zmq
from ramet.runtime.engine.stops import StopMatcher
from ramet.runtime.gateway.assembly import router
from ramet.runtime.gateway.engine_client import EngineClient
from ramet.runtime.gateway.executor import EngineExecutor
from ramet.runtime.gateway.service import Service, ServiceLimits
from ramet.runtime.gateway.token_bytes import BYTE_CHARACTERS
from ramet.runtime.gateway.tokenizer import Tokenizer
from ramet.runtime.program.events import Done, Event
from ramet.runtime.program.instructions import Instruction, Program
from ramet.runtime.protocol.codec import client_codec, engine_codec, gateway_codec, reply_codec
from ramet.runtime.protocol.errors import ErrorInfo
from ramet.runtime.protocol.kept import kept
from ramet.runtime.protocol.lane import lane_path, listen
from ramet.runtime.protocol.messages import (
    Abort,
    Answer,
    AppendProgram,
    Ask,
    Beat,
    Credit,
    Finish,
    Hello,
    NeedTokens,
    OpenProgram,
    ProgramEvents,
    PromptLogprobs,
    Release,
    StepOut,
    Submit,
    TopLogprobs,
    Welcome,
)
from ramet.runtime.protocol.trie import Trie
from ramet.runtime.protocol.wire import Wire

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TAIL = {byte: chr(point) for point, byte in BYTE_CHARACTERS.items()}["é".encode()[1]]
MERGES = [("a", "b"), ("c", "d"), ("ab", "cd"), ("l", "l"), ("Ġ", "x"), (TAIL, "!")]
MERGES += [("e", "o"), ("eo", "s"), ("eos", ">"), ("eos>", "z"), ("<", "eos>z")]
SPECIAL = ["<bos>", "<eos>", "<|im_start|>", "<|im_end|>"]
CONTEXT = 512


def make_tokenizer(template: str | None = CHATML, prefix: bool = False) -> Tokenizer:
    """Bytes, a few merges (ab, cd, abcd, ll, " x", the second half of é with "!", and what looks
    like a special token with a z) and four special tokens."""
    vocabulary = {chr(point): byte for point, byte in BYTE_CHARACTERS.items()}
    for left, right in MERGES:
        vocabulary[left + right] = len(vocabulary)
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, MERGES))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(SPECIAL)
    ids = {name: inner.token_to_id(name) for name in SPECIAL}
    return Tokenizer(
        inner,
        prefix=(ids["<bos>"],) if prefix else (),
        eos_ids=(ids["<eos>"], ids["<|im_end|>"]),
        bos_id=ids["<bos>"],
        chat_template=template,
    )


def hashed(tokens: list[int]) -> int:
    return int.from_bytes(hashlib.sha256(np.asarray(tokens, np.int32).tobytes()).digest()[:6])


def logprob(tokens: list[int], token: int) -> float:
    """Of ``token`` after ``tokens``: any number will do, as long as it depends on both."""
    return -1 - hashed([*tokens, token]) % 997 / 250


class FakeEngine:
    """Emits ``chunk`` tokens of each request a turn, by ``next_token``. Counts what it holds."""

    def __init__(self, address: str, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.table = tokenizer.bytes_table
        self.next_token: Callable[[list[int]], int] = self.any_token
        self.chunk = 1
        self.idle = False
        self.forgetful = False
        self.late = False
        self.refuse_flush = 0
        self.submits: list[Submit] = []
        self.prompts: list[list[int]] = []
        self.aborted: list[int] = []
        self.finished: list[Finish] = []
        self.outputs: dict[int, list[int]] = {}
        self.most_running = 0
        self.tries: dict[int, list[list[int]]] = {}
        """Of requests that had some: the sequences that end with each of their nodes."""
        self.handles: dict[int, list[int]] = {}
        self.credits = 0
        self.running: dict[int, dict[str, Any]] = {}
        self.connection = b""
        socket = zmq.Context.instance().socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(address)
        self.wire = Wire(socket, self._on_frames)
        self.task = asyncio.create_task(self._run())

    def any_token(self, tokens: list[int]) -> int:
        """Mostly letters and merges, now and then a piece of an emoji, rarely the end."""
        number = hashed(tokens)
        letters = [*range(97, 113), 32, 10, *range(256, 261), *"é😀".encode()]
        return self.tokenizer.eos_ids[0] if number % 23 == 0 else letters[number % len(letters)]

    def says(self, *texts: str | int) -> None:
        """Every answer is these tokens (text: its bytes one by one, or one merge), then the end."""
        script: list[int] = []
        for text in texts:
            script += [text] if isinstance(text, int) else self.tokenizer.encode(text)
        script.append(self.tokenizer.eos_ids[0])
        self.next_token = lambda tokens: script[len(tokens) - self._prompt_length(tokens)]

    def _prompt_length(self, tokens: list[int]) -> int:
        return max(len(p) for p in self.prompts if tokens[: len(p)] == p)

    def die(self) -> None:
        self.task.cancel()
        self.wire.close()

    def send(self, message: Any) -> None:
        self.wire.send([self.connection, reply_codec.encode(message)])

    def _on_frames(self, frames: list[bytes]) -> None:
        self.connection = frames[0]
        for data in frames[1:]:
            self._take(engine_codec.decode(data))

    def _take(self, message: Any) -> None:
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Abort):
            self.aborted += message.rids
            for rid in message.rids:
                self.running.pop(rid, None)
        elif isinstance(message, Release):
            for handle in message.handles:
                self.handles.pop(handle, None)
        elif isinstance(message, Credit):
            self.credits += message.steps
        elif isinstance(message, Ask):
            self._answer(message)

    def _answer(self, ask: Ask) -> None:
        if ask.op == "hello":
            self.send(Answer(id=ask.id, data={"context_length": CONTEXT, "model": "fake"}))
        elif ask.op == "flush" and self.refuse_flush > 0:
            self.refuse_flush -= 1
            self.send(Answer(id=ask.id, error=ErrorInfo("error", "requests are running")))
        else:
            self.send(Answer(id=ask.id, data={"op": ask.op, "pages": {"total": 1}}))

    def _submit(self, submit: Submit) -> None:
        ids = np.frombuffer(submit.ids, np.int32).tolist()
        self.submits.append(submit)
        if submit.base is not None:
            known = self.handles.get(submit.base)
            if self.forgetful or known is None or submit.base_len > len(known):
                self.send(NeedTokens(rid=submit.rid))
                return
            ids = known[: submit.base_len] + ids
        self._begin(submit, ids)

    def _begin(self, submit: Submit, ids: list[int]) -> None:
        self.prompts.append(ids)
        self.handles.update({handle: ids[:length] for handle, length in submit.marks})
        stops = submit.sampling.stops
        self.most_running = max(self.most_running, len(self.running) + 1)
        self.running[submit.rid] = {
            "submit": submit,
            "prompt": len(ids),
            "tokens": ids,
            "matcher": StopMatcher(stops) if stops else None,
            "again": submit.sampling.heal,
            "healed": 0,
        }

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(0.0005)
            if self.connection and self.running and not self.idle and self.credits > 0:
                self._step()

    def beat(self) -> None:
        self.send(Beat(step=0, running=len(self.running), waiting=0))

    def _step(self) -> None:
        rids: list[int] = []
        tokens: list[int] = []
        values: list[float] = []
        tops: dict[int, TopLogprobs] = {}
        prompts: list[PromptLogprobs] = []
        finished: list[Finish] = []
        for rid, request in list(self.running.items()):
            submit: Submit = request["submit"]
            sampling = submit.sampling
            made: list[int] = request["tokens"]
            if submit.trie is not None:
                prompts.append(self._trie_logprobs(rid, made, submit.trie))
            if sampling.logprob_start >= 0 and len(made) == request["prompt"]:
                prompts.append(self._prompt_logprobs(rid, made, sampling.logprob_start))
            end: dict[str, Any] | None = None if sampling.max_new_tokens else {"reason": "length"}
            for _ in range(self.chunk if end is None else 0):
                token = self._fitting(self.next_token(made), request["again"])
                value = logprob(made, token)
                if sampling.top_logprobs:
                    tops[len(rids)] = TopLogprobs(
                        ids=np.asarray([token], np.int32).tobytes(),
                        values=np.asarray([value], np.float32).tobytes(),
                    )
                rids.append(rid)
                tokens.append(token)
                values.append(value)
                made = request["tokens"] = [*made, token]
                end = self._end(request, token)
                if end is not None:
                    break
            if end is not None:
                del self.running[rid]
                self.outputs[rid] = made[request["prompt"] :]
                if submit.keep is not None:
                    self.handles[submit.keep] = made
                finished.append(Finish(rid=rid, prompt_tokens=request["prompt"], **end))
                if submit.then is not None:
                    self._go_on(submit.then, request, finished[-1])
        self.credits -= 1
        self.finished += finished
        if self.late and finished:
            self.wire._loop.call_later(
                0.01, self.send, StepOut(rids=b"", tokens=b"", finished=finished)
            )
            finished = []
        self.send(
            StepOut(
                rids=np.asarray(rids, np.int64).tobytes(),
                tokens=np.asarray(tokens, np.int32).tobytes(),
                logprobs=np.asarray(values, np.float32).tobytes(),
                tops=tops,
                prompts=prompts,
                finished=finished,
            )
        )

    def _go_on(self, then: Submit, request: dict[str, Any], finish: Finish) -> None:
        """What was sent with a request begins where that one ends, or its gateway is asked."""
        made, prompt = request["tokens"], request["prompt"]
        by_token = isinstance(finish.matched, int)
        count, carry = kept(made[prompt:], by_token, finish.text_bytes, self.table)
        if carry or self.forgetful:
            self.send(NeedTokens(rid=then.rid))
            return
        self.submits.append(then)
        own = np.frombuffer(then.ids, np.int32).tolist()
        self._begin(then, [*made[: prompt + count], *own])

    def _bytes(self, token: int) -> bytes:
        """None of ids that a test's own tokenizer has beyond ours."""
        return self.table[token] if token < len(self.table) else b""

    def _fitting(self, token: int, again: bytes) -> int:
        """A token that goes on with what is to be written again: this one, or the next byte."""
        data = self._bytes(token)
        fits = data and (again.startswith(data) or data.startswith(again))
        return token if fits or not again else again[0]

    def _end(self, request: dict[str, Any], token: int) -> dict[str, Any] | None:
        sampling, data = request["submit"].sampling, self._bytes(token)
        again = request["again"]
        request["again"] = again[len(data) :]
        if again and len(data) <= len(again):
            request["healed"] += 1
            return None
        count = len(request["tokens"]) - request["prompt"]
        if token in sampling.stop_ids and count > sampling.min_new_tokens:
            return {"reason": "stop", "matched": token}
        if request["matcher"] is not None:
            hit = request["matcher"].push(data[len(again) :])
            if hit is not None and count > sampling.min_new_tokens:
                return {"reason": "stop", "matched": hit[0], "text_bytes": hit[1]}
        most = sampling.max_new_tokens + request["healed"]
        return {"reason": "length"} if count >= most else None

    def _trie_logprobs(self, rid: int, prompt: list[int], trie: Trie) -> PromptLogprobs:
        tokens = np.frombuffer(trie.tokens, np.int32).tolist()
        parents = np.frombuffer(trie.parents, np.int32).tolist()
        paths: list[list[int]] = []
        for token, parent in zip(tokens, parents, strict=True):
            assert -1 <= parent < len(paths)
            paths.append([*(paths[parent] if parent >= 0 else prompt), token])
        self.tries[rid] = paths
        order = sorted(range(len(tokens)), key=lambda node: parents[node])
        scored = [paths[node] for node in order if len(paths[node]) > 1]
        noise = rid * 1e-7  # as a batch of another shape gives
        values = [logprob(path[:-1], path[-1]) + noise for path in scored]
        start = len(tokens) - len(values)
        return PromptLogprobs(rid=rid, start=start, values=np.asarray(values, np.float32).tobytes())

    def _prompt_logprobs(self, rid: int, tokens: list[int], start: int) -> PromptLogprobs:
        first = max(start, 1)
        noise = rid * 1e-7  # as a batch of another shape gives
        values = [logprob(tokens[:i], tokens[i]) + noise for i in range(first, len(tokens))]
        return PromptLogprobs(rid=rid, start=first, values=np.asarray(values, np.float32).tobytes())


class TestClient:
    """A client that speaks frames, as any library in any language would."""

    __test__ = False

    def __init__(self, address: str, version: int = 1, api_key: str | None = None) -> None:
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVHWM, 10)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        self.wire = Wire(socket, self._on_frames)
        self.hello = Hello(version=version, client="test", api_key=api_key)

    def _on_frames(self, frames: list[bytes]) -> None:
        message = gateway_codec.decode(frames[0])
        if isinstance(message, ProgramEvents) and bytes(message.events) == b"\x90":
            return  # the service looks whether we are there
        self.inbox.put_nowait(message)

    def send(self, message: Any) -> None:
        self.wire.send([client_codec.encode(message)])

    def send_raw(self, *frames: bytes) -> None:
        self.wire.send(frames)

    async def next(self) -> Any:
        return await asyncio.wait_for(self.inbox.get(), 5)

    async def greet(self) -> Welcome:
        self.send(self.hello)
        return await self.next()

    def open(self, instructions: list[Instruction], pid: int = 1, **fields: Any) -> None:
        fields.setdefault("closed", True)
        program = msgspec.Raw(msgspec.msgpack.encode(Program(instructions=tuple(instructions))))
        self.send(OpenProgram(pid=pid, program=program, **fields))

    def append(self, instructions: list[Instruction], pid: int = 1, closed: bool = False) -> None:
        data = msgspec.Raw(msgspec.msgpack.encode(instructions))
        self.send(AppendProgram(pid=pid, instructions=data, closed=closed))

    async def events(self, pid: int = 1) -> list[Event]:
        """All events of a program, to its end."""
        events: list[Event] = []
        while not (events and isinstance(events[-1], Done)):
            message = await self.next()
            assert isinstance(message, ProgramEvents), message
            assert message.pid == pid
            events += msgspec.msgpack.decode(message.events, type=list[Event])
        return events

    def stop_reading(self) -> None:
        """As a client does that hangs."""
        asyncio.get_running_loop().remove_reader(self.wire._descriptor)
        self.wire._look = self.wire._read = lambda: None

    def close(self) -> None:
        self.wire.close()


class World:
    """An engine, a gateway and clients, in one loop."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self.folder = folder
        self.tokenizer = tokenizer
        self.engine_address = f"ipc://{folder}/engine"
        self.address = f"ipc://{folder}/gateway"
        self.engine = FakeEngine(self.engine_address, tokenizer)
        self.client_of_engine = EngineClient(self.engine_address, silence_s=60)
        self.executor = EngineExecutor(self.client_of_engine, tokenizer, CONTEXT)
        self.services: list[Service] = []
        self.clients: list[TestClient] = []

    async def context(self, salt: str | None = None) -> Any:
        await self.client_of_engine.start(5)
        return self.executor.open(1, salt)

    async def serve(
        self,
        *,
        api_key: str | None = None,
        admin_key: str | None = None,
        limits: ServiceLimits | None = None,
    ) -> Service:
        await self.client_of_engine.start(5)
        limits = limits or ServiceLimits()
        socket = router(limits)
        socket.setsockopt(zmq.SNDHWM, 5)
        socket.bind(self.address)
        keys = {"api_key": api_key, "admin_key": admin_key}
        path = lane_path(self.address)
        assert path is not None
        lanes = listen(path)
        service = Service(socket, self.executor, model="fake", limits=limits, lanes=lanes, **keys)
        self.services.append(service)
        return service

    def client(self, **options: Any) -> TestClient:
        client = TestClient(self.address, **options)
        self.clients.append(client)
        return client

    async def settle(self, check: Callable[[], bool], seconds: float = 5.0) -> None:
        """Wait until something holds."""
        deadline = asyncio.get_running_loop().time() + seconds
        while not check():
            assert asyncio.get_running_loop().time() < deadline, "it never came to hold"
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        for client in self.clients:
            client.close()
        for service in self.services:
            await service.close()
        self.client_of_engine.close()
        self.engine.die()


@pytest.fixture(scope="session")
def new_tokenizer() -> Callable[..., Tokenizer]:
    return make_tokenizer


@pytest.fixture(scope="session")
def new_world(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Makes worlds inside a running loop: ``async with new_world() as world``."""
    shared = make_tokenizer()

    @asynccontextmanager
    async def world(tokenizer: Tokenizer | None = None) -> AsyncIterator[World]:
        made = World(tmp_path_factory.mktemp("w", numbered=True), tokenizer or shared)
        try:
            yield made
        finally:
            await made.close()

    return world


@pytest.fixture
async def world(new_world: Callable[..., Any]) -> AsyncIterator[World]:
    async with new_world() as made:
        yield made


@pytest.fixture(scope="session")
def scored() -> Callable[[list[int], int], float]:
    """The fake engine's log-prob of a token after others."""
    return logprob


@pytest.fixture
def near() -> Callable[[float, float], bool]:
    return lambda a, b: math.isclose(a, b, abs_tol=1e-5)
