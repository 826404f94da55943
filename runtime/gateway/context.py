"""Streams of programs over the engine: literal text kept as text until a generation cuts it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from ..program.executor import Following, GenResult, OnDelta, SelectResult
from ..program.instructions import ChoicesMethod
from ..protocol.errors import ProgramError
from ..protocol.sampling import SamplingParams
from .cutting import LONG, Cutter, Known
from .fork_point import ForkPoint, Mark
from .generation import Generation, Sample, all_of, pieces_for
from .going_on import GoingOn
from .healing import TakenBack
from .history import History, Item, Segment
from .request import Handle, IntArray, joined
from .scoring import score_choices
from .template import TemplateSession
from .trie_scoring import TrieScoring

if TYPE_CHECKING:
    from .executor import EngineExecutor

SCORE_ONLY = SamplingParams(max_new_tokens=0, temperature=0.0, seed=0)
_REWRITES = (
    "the chat template changed the conversation before this message; what was cached of it"
    " cannot be used from there on"
)
_MOST_POINTS = 8
_NONE = np.empty(0, np.int32)


class EngineContext:
    """One stream: tokens that are settled, then literal text that is not cut yet.

    ``_ids`` are exact: what the model generated is there as it was generated. ``_handle`` is where
    the engine keeps the first ``_handle_len`` of them.
    """

    def __init__(self, executor: EngineExecutor, program: int, namespace: bytes) -> None:
        self._executor = executor
        self._program = program
        self._namespace = namespace
        self._ids: IntArray = _NONE
        self._pending: list[Item] = []
        self._literal = 0
        """The first of the pending items that may be healed: the rest is text of the program."""
        self._prepend = True
        self._role: str | None = None
        self._session: TemplateSession | None = None
        self._history = History()
        self._strips = False
        self._handle: Handle | None = None
        self._handle_len = 0
        self._warnings: list[tuple[str, str]] = []
        self._points: list[ForkPoint] = []
        self._marks: tuple[Mark, ...] = ()
        self._remaining = 0
        self._reads = True
        self._explain = False
        self._known = Known(executor.tokenizer)
        self._going_on = GoingOn(executor, self._known)

    # --- literal text ---

    def append(self, text: str) -> None:
        if self._strips and self._history.at_start:
            text = text.lstrip()
        if text:
            self._add((text, self._role is None))

    def role_begin(self, role: str) -> str:
        if self._session is None:
            self._session = TemplateSession(self._executor.tokenizer.template)
        opening = self._session.open(role)
        if not len(self._ids) and not self._pending:
            self._prepend = False  # a rendered template already holds what comes first
        if opening.rewrites is not None:
            self._rewrite(opening.rewrites)
        elif opening.prefix:
            self._pending.append((opening.prefix, True))
        self._literal = len(self._pending)
        self._role = role
        self._strips = opening.strips
        self._history.open()
        return opening.prefix

    def role_end(self, role: str) -> str:
        if self._session is None or self._role != role:
            raise ProgramError(f"role {role!r} is not open")
        if self._strips:
            self._strip_end()
        suffix = self._session.close()
        self._history.close()
        self._role = None
        self._strips = False
        if suffix:
            self._pending.append((suffix, True))
        self._literal = len(self._pending)
        return suffix

    def _add(self, item: Item) -> None:
        """Content: of the open message, when there is one."""
        self._pending.append(item)
        self._history.add(item)

    def _strip_end(self) -> None:
        """Drop blanks at the end of the message, as the template would."""
        last = self._history.pop_text()
        if last is None or not self._pending or self._pending[-1] is not last:
            return
        self._pending.pop()
        if text := last[0].rstrip():
            self._add((text, last[1]))

    def _rewrite(self, pieces: Sequence[str | int]) -> None:
        """The template has changed what it wrote before: begin anew from its whole rendering."""
        self._ids = _NONE
        self._keep(None, 0)
        self._prepend = False
        self._pending = []
        for piece in pieces:
            if isinstance(piece, str):
                self._pending.append((piece, True))
            else:
                self._pending += self._history.messages[piece]
        self._warnings.append(("template_rewrites", _REWRITES))

    def fork(self) -> EngineContext:
        child = self._copy()
        child._handle = self._handle.acquire() if self._handle is not None else None
        child._handle_len = self._handle_len
        self._stand_at_fork()
        child._points = [point.acquire() for point in self._points]
        return child

    def _stand_at_fork(self) -> None:
        """What the engine does not keep yet of this stream's text will be read by several."""
        if self._points and self._points[-1].is_at(self._ids, self._pending):
            return
        if self._pending or self._handle_len < len(self._ids):
            if len(self._points) == _MOST_POINTS:
                self._points.pop(0).release()  # the others begin with it
            point = ForkPoint(self._ids, self._pending, self._copy()._prompt)
            self._points.append(point.acquire())

    def _copy(self) -> EngineContext:
        """The same text, without what is held in the engine."""
        child = EngineContext(self._executor, self._program, self._namespace)
        child._ids = self._ids
        child._share(self._known)
        child._pending = [*self._pending]
        child._literal = self._literal
        child._prepend = self._prepend
        child._role = self._role
        child._session = self._session.fork() if self._session is not None else None
        child._history = self._history.fork()
        child._strips = self._strips
        return child

    def _share(self, known: Known) -> None:
        self._known = self._going_on.known = known

    def warnings(self) -> list[tuple[str, str]]:
        told, self._warnings = self._warnings, []
        return told

    def close(self) -> None:
        self.rest()

    # --- what the program still does ---

    def expect(self, remaining: int, reads: bool) -> None:
        self._remaining, self._reads = remaining, reads

    def rest(self) -> None:
        self._keep(None, 0)
        self._leave_points()
        self._going_on.drop()

    def announce(self, following: Sequence[Following]) -> None:
        self._going_on.announce(following)

    def _leave_points(self) -> None:
        points, self._points = self._points, []
        for point in points:
            point.release()

    def explain_next(self) -> None:
        self._explain = True

    async def _look_ahead(self, prompt: IntArray) -> None:
        """Have the next request mark what others of the program will read of its prompt."""
        for point in self._points:
            self._marks += (*(await point.mark(prompt, self._executor.engine.new_handle)),)

    async def scoring(self, prompt: IntArray, keep: Handle | None) -> TrieScoring:
        """What scores continuations of ``prompt``, which begins with all that is settled; it is
        kept in ``keep``."""
        await self._look_ahead(prompt)
        marks, self._marks = self._marks, ()
        explain, self._explain = self._explain, False
        return TrieScoring(
            self._executor.engine,
            prompt,
            self._executor.room,
            base=self._handle,
            base_len=self._handle_len,
            keep=keep,
            namespace=self._namespace,
            program=self._program,
            remaining=self._remaining,
            marks=marks,
            explain=explain,
        )

    # --- cutting text into tokens ---

    def cutter(self) -> Cutter:
        """What cuts the text behind the settled tokens."""
        before = int(self._ids[-1]) if len(self._ids) else None
        items = [*self._pending]
        return Cutter(self._executor.tokenizer, items, before, self._prepend, self._known)

    async def tokens(self) -> list[int]:
        """Those after the settled ones, as of now. A long text is cut in a thread."""
        cutter = self.cutter()
        return cutter.whole() if cutter.size < LONG else await asyncio.to_thread(cutter.whole)

    async def _prompt(self) -> IntArray:
        """All tokens as of now. A prompt of nothing starts with the model's first token."""
        tokens = await self.tokens()
        if not tokens and not len(self._ids):
            bos = self._executor.tokenizer.bos_id
            tokens = [] if bos is None else [bos]
        return joined(self._ids, tokens)

    async def _take_back(self, prompt: IntArray) -> TakenBack:
        """The prompt without what of its last literal is to be cut anew."""
        healer = await self._executor.healer()
        before, literal = self._pending[: self._literal], self._pending[self._literal :]
        text = "".join(item[0] for item in literal if isinstance(item, tuple))[-healer.reach :]
        last = before[-1] if before else None
        if not isinstance(last, tuple) or not last[0].endswith(" "):
            text = " " + text  # one that some tokenizers put before a text is the literal's
        return healer.take_back(prompt, len(self._ids), text.encode("utf-8", "replace"))

    def _settle(self, ids: IntArray) -> None:
        self._ids = ids
        self._pending = []
        self._literal = 0

    def _keep(self, handle: Handle | None, length: int) -> None:
        old, self._handle, self._handle_len = self._handle, handle, length
        if old is not None:
            old.release()

    def generation(
        self, prompt: IntArray, params: SamplingParams, back: TakenBack | None = None
    ) -> Generation:
        """One request of this stream, resolved and ready to run. ``back``: what is left of the
        prompt, where it is to be healed."""
        executor = self._executor
        sampling = executor.resolve(params, len(prompt))
        if back is not None:
            prompt, sampling = back.prompt, back.sampling(sampling)
        marks, self._marks = self._marks, ()
        return Generation(
            executor.engine,
            executor.tokenizer,
            params,
            prompt,
            sampling,
            base=self._handle,
            base_len=self._handle_len,
            namespace=self._namespace,
            program=self._program,
            remaining=self._remaining,
            marks=marks,
        )

    # --- generations ---

    async def gen(
        self, sampling: SamplingParams, name: str | None, on_delta: OnDelta | None
    ) -> list[GenResult]:
        del name
        sent = self._going_on.take(self._pending, self._ids, sampling)
        if sent is not None:
            sample, keep = await self._going_on.run(*sent, sampling, on_delta)
            self._take_in(sample, sent[1], keep)
            return [GenResult(sample.text, sample.meta)]
        prompt = await self._prompt()
        back = TakenBack(prompt)
        if sampling.heal and sampling.max_new_tokens != 0:
            back = await self._take_back(prompt)
        await self._look_ahead(back.prompt)
        first = self.generation(prompt, sampling, back)
        self._going_on.send_with(first, self._role is None)
        reads = self._reads and first.then is None
        keep = first.keep = self._executor.engine.new_handle() if reads else None
        jobs = [first.run(pieces_for(on_delta))]
        others = [replace(first.sample(i), keep=None, marks=()) for i in range(1, sampling.n)]
        jobs += [other.run() for other in others]
        try:
            samples: list[Sample] = [await jobs[0]] if len(jobs) == 1 else await all_of(jobs)
        except BaseException:
            self._going_on.drop()
            if keep is not None:
                keep.release()
            raise
        self._take_in(samples[0], back.prompt, keep, back.prefix)
        return [GenResult(sample.text, sample.meta) for sample in samples]

    def _take_in(
        self, sample: Sample, prompt: IntArray, keep: Handle | None, healed: bytes = b""
    ) -> None:
        """The stream is what was generated behind ``prompt``; the engine has it in ``keep``.
        ``healed``: what the output wrote again of the text before it."""
        kept = sample.tokens[: sample.kept]
        self._settle(joined(prompt, kept))
        self._keep(keep, len(self._ids) if keep is not None else 0)
        self._leave_points()
        self._history.cut(len(healed.decode()))
        self._history.add(np.asarray(kept, np.int32))
        if sample.carry:
            self._add((sample.carry, False))
            self._literal = len(self._pending)

    async def select(
        self,
        choices: Sequence[str],
        method: ChoicesMethod,
        boundary: Literal["exact", "plain"],
        name: str | None,
    ) -> SelectResult:
        del name
        keep = self._executor.engine.new_handle() if self._reads else None
        try:
            scored = await score_choices(
                self,
                self._executor.tokenizer,
                choices,
                method,
                boundary,
                keep,
                self._executor.context_length,
            )
        except BaseException:
            if keep is not None:
                keep.release()
            raise
        self._settle(scored.ids)
        self._keep(keep, scored.shared if keep is not None else 0)
        if not scored.shared:
            self._keep(None, 0)  # nothing was there to be kept
        self._leave_points()
        self._history.add((choices[scored.index], self._role is None))
        return SelectResult(scored.index, scored.meta)

    async def warm(self) -> None:
        prompt = await self._prompt()
        if len(prompt):
            await self._look_ahead(prompt)
            await self.generation(prompt, SCORE_ONLY).run()

    def bare(self) -> EngineContext:
        """A context of the same program with nothing in it."""
        return EngineContext(self._executor, self._program, self._namespace)

    def settled(self) -> IntArray:
        """The tokens that no later text can change."""
        return self._ids

    def segment(self, text: str) -> Segment:
        """Text of the program as it would be appended."""
        return text, self._role is None
