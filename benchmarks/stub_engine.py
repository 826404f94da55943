"""An engine without a model: what is in front of it, measured and tested by itself.

Runs in the engine's place (see `launched`) and speaks its messages. Without ``--echo`` it gives
every running request one word a step, at ``--rate`` tokens a second over all of them. The words of
a step are all the same, so that whoever reads one knows the step; with ``--times FILE`` the moment
at which each step was sent is kept there. With ``--echo`` each answer is what stands between [[ and
]] in its prompt.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from ramet.runtime import launch
from ramet.runtime.child import follow_parent, tell_ready
from ramet.runtime.config import EngineConfig
from ramet.runtime.engine.stops import StopMatcher
from ramet.runtime.gateway.tokenizer import Tokenizer
from ramet.runtime.model.store import resolve
from ramet.runtime.protocol.codec import engine_codec, reply_codec
from ramet.runtime.protocol.messages import (
    Abort,
    Answer,
    Ask,
    Beat,
    Credit,
    Finish,
    NeedTokens,
    PromptLogprobs,
    StepOut,
    Submit,
)

CONTEXT = 8192
STEPS_KEPT = 1 << 16
ARGUMENTS_VARIABLE = "RAMET_STUB_ARGUMENTS"
_LOGPROB = -1.0


@contextmanager
def launched(*arguments: str, **settings: Any) -> Iterator[launch.Launched]:
    """A gateway that serves, with this in the place of its engine."""
    real, path = launch.MODULES["engine"], os.environ.get("PYTHONPATH")
    launch.MODULES["engine"] = Path(__file__).stem
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, [path])])
    os.environ[ARGUMENTS_VARIABLE] = "\n".join(arguments)
    try:
        running = launch.start({"port": 0, "zmq_port": 0, **settings}, listen=True)
    finally:
        launch.MODULES["engine"] = real
        del os.environ[ARGUMENTS_VARIABLE], os.environ["PYTHONPATH"]
        if path is not None:
            os.environ["PYTHONPATH"] = path
    try:
        yield running
    finally:
        running.stop()


def words_of(tokenizer: Tokenizer) -> list[tuple[int, str]]:
    """Tokens that are a space and small letters: none is part of another's text."""
    found = ((i, data.decode("ascii", "ignore")) for i, data in enumerate(tokenizer.bytes_table))
    return [(i, text[1:]) for i, text in found if re.fullmatch(r" [a-z]+", text)]


class Row:
    """A request that runs."""

    def __init__(self, submit: Submit, script: list[int] | None) -> None:
        sampling = submit.sampling
        self.rid = submit.rid
        self.prompt = len(submit.ids) // 4
        self.script = script
        self.made = 0
        self.most = sampling.max_new_tokens
        self.start = sampling.logprob_start
        self.logprobs = sampling.logprobs
        self.stop_ids = frozenset(sampling.stop_ids)
        self.matcher = StopMatcher(sampling.stops) if sampling.stops else None


class StubEngine:
    """One thread: receive, step when a step is due, send."""

    def __init__(self, address: str, tokenizer: Tokenizer, options: argparse.Namespace) -> None:
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        self._socket.bind(address)
        self._tokenizer = tokenizer
        self._table = tokenizer.bytes_table
        self._words = [token for token, _ in words_of(tokenizer)]
        self._rate: float = options.rate
        self._echo: bool = options.echo
        self._end = tokenizer.eos_ids[0]
        self._most_words: int = options.words
        self._times = None
        if options.times:
            self._times = np.memmap(options.times, np.float64, "w+", shape=(STEPS_KEPT,))
        self._rows: dict[bytes, dict[int, Row]] = {}
        self._credits: dict[bytes, int] = {}
        self._steps = 0
        self._sent = 0.0

    def run(self) -> None:
        beaten = 0.0
        while True:
            now = time.monotonic()
            if now - beaten > 1.0:
                beaten = now
                running = sum(map(len, self._rows.values()))
                for peer in self._credits:
                    self._send(peer, Beat(step=self._steps, running=running, waiting=0))
            due = self._due()
            if due > 0:
                wait = min(due, 1.0)
                if self._socket.poll(int(wait * 1000)):
                    self._receive()
                elif wait < 0.001:
                    time.sleep(wait)
                continue
            self._sent = max(now, self._sent + self._interval())
            for peer in list(self._rows):
                self._step(peer)
            self._steps += 1
            self._receive()

    def _interval(self) -> float:
        running = sum(map(len, self._rows.values()))
        return running / self._rate if self._rate else 0.0

    def _due(self) -> float:
        """Seconds until the next step; 1 where there is nothing to do."""
        if not any(rows and self._credits[peer] > 0 for peer, rows in self._rows.items()):
            return 1.0
        return self._sent + self._interval() - time.monotonic()

    def _send(self, peer: bytes, message: Any) -> None:
        self._socket.send_multipart([peer, reply_codec.encode(message)])

    def _receive(self) -> None:
        while True:
            try:
                peer, *messages = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._rows.setdefault(peer, {})
            self._credits.setdefault(peer, 0)
            for data in messages:
                self._take(peer, engine_codec.decode(data))

    def _take(self, peer: bytes, message: Any) -> None:
        rows = self._rows[peer]
        match message:
            case Submit() if message.base is not None:
                self._send(peer, NeedTokens(rid=message.rid))
            case Submit():
                rows[message.rid] = Row(message, self._script(message))
            case Abort():
                for rid in message.rids:
                    rows.pop(rid, None)
            case Credit():
                self._credits[peer] += message.steps
            case Ask(op="hello"):
                data = {"context_length": CONTEXT, "model": "stub"}
                self._send(peer, Answer(id=message.id, data=data))
            case Ask(op="explain"):
                data = {"here": {"index": 0, "reason": "off"}}
                self._send(peer, Answer(id=message.id, data=data))
            case Ask(op="tree"):
                self._send(peer, Answer(id=message.id, data={"nodes": []}))
            case Ask():
                data = {
                    "pages": {"total": 1, "free": 1, "cached": 0, "held": 0},
                    "requests": {"running": len(rows), "waiting": 0},
                }
                self._send(peer, Answer(id=message.id, data=data))
            case _:
                pass

    def _script(self, submit: Submit) -> list[int] | None:
        if not self._echo:
            return None
        prompt = self._tokenizer.decode(np.frombuffer(submit.ids, np.int32).tolist())
        found = re.findall(r"\[\[(.*?)\]\]", prompt, re.DOTALL)
        text = found[-1] if found else "nothing to repeat"
        return [*self._tokenizer.encode(text), self._tokenizer.eos_ids[0]]

    def _step(self, peer: bytes) -> None:
        rows = self._rows[peer]
        if not rows or self._credits[peer] <= 0:
            return
        word = self._words[self._steps % len(self._words)]
        tokens: list[int] = []
        finished: list[Finish] = []
        prompts: list[PromptLogprobs] = []
        rids = [rid for rid, row in rows.items() if row.most]
        for row in list(rows.values()):
            if row.start >= 0 and not row.made:
                first = max(row.start, 1)
                values = np.full(row.prompt - first, _LOGPROB, np.float32).tobytes()
                prompts.append(PromptLogprobs(rid=row.rid, start=first, values=values))
            if row.most:
                token = self._end if row.made >= self._most_words else word
                if row.script is not None:  # past its end where ends are ignored
                    token = row.script[min(row.made, len(row.script) - 1)]
                tokens.append(token)
                row.made += 1
            ended = self._ended(row, tokens[-1] if row.most else -1)
            if ended is not None:
                finished.append(ended)
                del rows[row.rid]
        logprobs = np.full(len(tokens), _LOGPROB, np.float32).tobytes()
        self._credits[peer] -= 1
        if self._times is not None:
            self._times[self._steps % STEPS_KEPT] = time.monotonic()
        step = StepOut(
            rids=np.asarray(rids, np.int64).tobytes(),
            tokens=np.asarray(tokens, np.int32).tobytes(),
            logprobs=logprobs if self._echo else None,
            prompts=prompts,
            finished=finished,
        )
        self._send(peer, step)

    def _ended(self, row: Row, token: int) -> Finish | None:
        if token in row.stop_ids:
            return Finish(rid=row.rid, reason="stop", matched=token, prompt_tokens=row.prompt)
        hit = None
        if row.matcher is not None and token >= 0:
            hit = row.matcher.push(self._table[token])
        if hit is not None:
            return Finish(
                rid=row.rid,
                reason="stop",
                matched=hit[0],
                text_bytes=hit[1],
                prompt_tokens=row.prompt,
            )
        if row.made >= row.most or row.prompt + row.made >= CONTEXT:
            return Finish(rid=row.rid, reason="length", prompt_tokens=row.prompt)
        return None


def main() -> None:
    follow_parent()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--bind", required=True)
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--echo", action="store_true")
    parser.add_argument("--words", type=int, default=1 << 30, help="an answer ends after so many")
    parser.add_argument("--times")
    given = os.environ.get(ARGUMENTS_VARIABLE, "")
    options = parser.parse_args([*sys.argv[1:], *filter(None, given.split("\n"))])
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = EngineConfig.from_json(options.config)
    tokenizer = Tokenizer.from_files(resolve(config.model_path))
    engine = StubEngine(options.bind, tokenizer, options)
    tell_ready(context_length=CONTEXT, model="stub")
    engine.run()


if __name__ == "__main__":
    main()
