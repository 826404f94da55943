"""Continuous batching: what each step computes. Plain data in, a batch out; no model, no device."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import numpy as np

from ..memory.kv_memory import KVMemory
from ..memory.page_pool import SlotArray
from ..memory.radix_node import Node
from ..protocol.errors import RametError
from .admission import Admission
from .batch import IntArray
from .building import Planned, StepBuilder
from .holds import Holds
from .limits import Limits
from .loading import Loading
from .policies import POLICIES, aged_first, by_priority, claim_of, overdue
from .preemption import Preemption
from .request import Request
from .rows import Rows
from .segments import SegmentFinder, SharingCost
from .siblings import Siblings
from .turns import Turns
from .waiting import Waiting, cached, check_fits, check_queue, classify, memory_full

SCRATCH = 0
"""A slot of the pool's first page, which nobody is given: what is written there is never read."""
PLENTY = 0.25
"""Of all slots."""
JUMP_TOGETHER = 4
"""Rows that are taken to have forced tokens at the same time."""
_NO_SLOTS: SlotArray = np.empty(0, np.int32)


class MustDrain(Exception):  # noqa: N818 - a signal between two modules, not a failure
    """Memory ran out while a step is in flight: its samples are needed before someone is
    retracted."""


class Scheduler:
    """Owns who waits, who runs, and their KV.

    A step: every running decode, then chunks of prompts being prefilled, then admissions, as far as
    the token budget goes. KV that a step will write counts as cached at once, also for other
    requests of the same step: the runner writes all K and V of a layer before any of its attention.
    """

    def __init__(
        self,
        limits: Limits,
        memory: KVMemory,
        *,
        policy: str = "fcfs",
        conservativeness: float = 1.0,
        sharing: SharingCost | None = None,
    ) -> None:
        """``sharing``: what it costs the runner to read keys once for several rows, if it can."""
        self.limits = limits
        self.memory = memory
        self.rows = Rows(limits.max_rows, limits.context_length)
        self.waiting = Waiting(memory)
        self.aside = Waiting(memory)
        """Requests that cannot be considered yet: their grammar is being compiled."""
        self.loading = Loading(memory, self.waiting)
        self.failed: list[tuple[Request, RametError]] = []
        """Requests that can never run; the engine takes them away."""
        self.num_retracted = 0
        self._holds = Holds(self.rows, memory)
        self._policy = POLICIES[policy]()
        self._admission = Admission(self.rows, memory.total, conservativeness, self.loading)
        self._siblings = Siblings(self.rows, memory)
        self._preemption = Preemption(self.rows, self.waiting, self._siblings, limits.classes)
        self._segments = SegmentFinder(self.rows, sharing) if sharing and memory.caching else None
        self._serial = 0
        sizes = limits.prompt_sizes
        self._turns = Turns(self.rows, self.waiting, self._preemption, sizes[-1]) if sizes else None

    # --- requests come and go -------------------------------------------------------------------

    def add(self, request: Request, *, aside: bool = False) -> None:
        """Queue a request, or with ``aside`` keep it until `bring_in`. Raises `ContextLengthError`
        for one that can never run, `BadInputError` for a class that is not there,
        `QueueFullError`."""
        limits = self.limits
        check_fits(request, limits.context_length, self.memory.total)
        cls = classify(request, limits.classes)
        queues = self.waiting, self.aside, self.loading.requests
        check_queue(request, cls, queues, limits.max_waiting, limits.max_waiting_tokens)
        self._serial += 1
        request.serial = self._serial
        request.arrival = request.arrival or time.monotonic()
        (self.aside if aside else self.waiting).append(request)

    def bring_in(self, request: Request) -> None:
        """A request that stood aside takes the place in the queue that it would have now."""
        self.aside.remove(request)
        request.brought_in = time.monotonic()
        self.waiting.place(request)

    def remove(self, request: Request, *, poisoned: bool = False) -> Node | None:
        """Take a request away, wherever it is. What it computed stays cached (unless it is
        ``poisoned``), up to the node returned (``None`` if it was not running)."""
        if request is self._preemption.refused:
            self._preemption.refused = None
        if request.row >= 0:
            return self._holds.give_up(request.row, poisoned=poisoned)
        queues = self.waiting, self.aside, self.loading
        next(queue for queue in queues if request in queue).remove(request)
        return None

    def go_on(self, request: Request, kept: int) -> bool:
        """A running request has ended after the first ``kept`` of its tokens, and names another
        that goes on behind them: it takes over the row, and no other is let in before it. False:
        the request is still there, as somebody who waits comes first, or there is no room."""
        then, waiting = request.then, self.waiting
        if then is None or request.row < 0 or request.sampling.max_new_tokens == 0:
            return False
        limits, end = self.limits, kept + len(then.tokens)
        if (
            end + max(then.sampling.max_new_tokens, 1)
            > min(limits.context_length, self.memory.total)
            or limits.classes[request.cls].context_length
        ):
            return False
        now = time.monotonic()
        if waiting and (
            waiting.most_urgent < request.level or overdue(waiting, now, limits.ageing)
        ):
            return False
        need = max(end - int(self.rows.computed[request.row]), 0)
        if not self._has_kv(need, then.sampling.max_new_tokens):
            return False
        then.cls, then.level = request.cls, request.level
        if not self._holds.go_on(request.row, kept, then):
            return False
        self._serial += 1
        then.serial = int(self._serial)
        self.rows.serial[then.row] = then.serial
        then.arrival = then.admitted = now
        return True

    def _has_kv(self, need: int, new: int) -> bool:
        """Whether there is KV for what goes on in a row. Where much of it can be had nobody
        calculates."""
        memory = self.memory
        if memory.available > memory.total * PLENTY:
            return True
        peak = self._admission.peak(need, new)
        return self._admission.fits(memory.tree.num_locked, need, new, peak)

    def append_forced(self, row: int, tokens: IntArray) -> bool:
        """Give a decoding row output that it did not sample. It is computed like a prompt, and the
        row samples again after it; a sample of the row that is under way is dropped. Call it when
        all that the row sampled before is known.

        False, and nothing changed, when that saves no step, costs the other rows more than it saves
        this one, or there is no KV for it.
        """
        rows = self.rows
        saved = int(rows.known[row]) + len(tokens) - int(rows.computed[row]) - 1
        return saved >= 1 and self._jump_pays(saved) and self._holds.force(row, tokens)

    def _jump_pays(self, saved: int) -> bool:
        """Whether ``saved`` steps of one row are worth a step of its own kind. Where prompts take
        turns with decodes, every other row waits for it; some jump together."""
        if not self.limits.prompt_sizes:
            return True
        return saved * JUMP_TOGETHER >= len(self.rows.decoding) - 1

    def running(self) -> Iterator[Request]:
        return (request for request in self.rows.requests if request is not None)

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.rows.running and not self.loading

    # --- a step ---------------------------------------------------------------------------------

    def plan(self, *, drained: bool = True) -> Planned | None:
        """The next step, or ``None`` when there is nothing to compute.

        ``drained``: every earlier step's samples are known. If they are not and a request must be
        retracted, raises `MustDrain` with nothing changed.
        """
        self.loading.poll(self._preemption.refused)
        self._make_way(drained)
        builder = StepBuilder(self.rows)
        alone = self._prompts_alone()
        if not alone:
            builder.add_decodes(*self._grow_decodes(drained))
            if not builder.count or not self.limits.prompt_sizes:
                self._add_prompts(builder, self.limits.step_tokens)
        else:
            self._add_prompts(builder, self.limits.prompt_sizes[-1])
            if not builder.count:
                builder.add_decodes(*self._grow_decodes(drained))
        planned = builder.build(self._holds.new_rows, self._holds.moves)
        if planned is not None:
            if self._turns is not None:
                self._turns.taken(prompts=not planned.batch.num_decodes, asked=alone)
            self._holds.told()
            self._admission.step()
            batch = planned.batch
            if self._segments is not None and batch.num_decodes == len(batch.rows):
                batch.tree = self._segments.find(batch.rows, batch.kv_lens)
        return planned

    def _make_way(self, drained: bool) -> None:
        """Send a running request back where one waits that is far more urgent."""
        row = self._preemption.victim()
        if row is None:
            return
        if not drained:
            raise MustDrain
        self._preemption.refused = None  # it is asked again before another makes way
        self._send_back(row)
        if self._turns is not None:
            self._turns.hurry()

    def _prompts_alone(self) -> bool:
        """Whether this step holds prompts without decodes: where such steps are captured, they take
        turns with those that decode, and only when nothing decodes may a step be larger."""
        return self._turns is not None and self._turns.prompts_next()

    def _add_prompts(self, builder: StepBuilder, budget: int) -> None:
        """Chunks of prompts, as far as the budget goes."""
        rows = self.rows
        for row in self._prefills():
            request = rows.requests[row]
            assert request is not None
            start = int(rows.computed[row])
            end = min(int(rows.target[row]), start + budget)
            budget -= end - start
            self._holds.begin(row)
            builder.add_chunk(request, end)
            own = rows.slots[row, start:end].copy()
            # What follows an output stays private as that does, until the request ends.
            if start < request.prompt_len and not request.took_over:
                self._holds.share(row)
            # What the tree had already is not written again: its twin here was just freed.
            kept = rows.slots[row, start:end]
            builder.write_to(np.where(kept == own, own, np.int32(SCRATCH)))
            if budget <= 0:
                return

    def _grow_decodes(self, drained: bool) -> tuple[IntArray, SlotArray]:
        """Rows that decode, each with a slot for its next token; retracts when there are too
        few."""
        rows = self.rows
        while True:
            if not rows.running:
                return _NO_SLOTS, _NO_SLOTS
            decodes = rows.decoding
            if not len(decodes):
                return decodes, _NO_SLOTS
            position = rows.computed[decodes]
            slots = self.memory.allocate_next(rows.slots[decodes, position - 1], position)
            if slots is not None:
                return decodes, slots
            if self.loading.settle():
                continue
            if not drained:
                raise MustDrain
            self._retract()

    def _prefills(self) -> Iterator[int]:
        """Rows with prompt left to compute, and newly admitted ones behind those that are as
        urgent. The caller plans a row's chunk before it asks for the next."""
        rows, waiting = self.rows, self.waiting
        begun = self._begun() if rows.running else []
        first = waiting.most_urgent if waiting and rows.has_room else None
        while begun and (first is None or self._claim(begun[0]) <= first):
            yield begun.pop(0)
        if waiting and rows.has_room:
            yield from self._admitted(begun)
        yield from begun

    def _admitted(self, begun: list[int]) -> Iterator[int]:
        """Rows of requests that are let in, and before each, taken out of ``begun``, those that are
        as urgent."""
        rows = self.rows
        self._siblings.refresh()
        self._preemption.refused = None
        room = self._preemption.room()
        for request in self._ordered():
            while begun and self._claim(begun[0]) <= request.level:
                yield begun.pop(0)
            if not rows.has_room:
                return
            if room.get(request.cls, 1) <= 0 or self._siblings.must_wait(request):
                continue
            if not self._admit(request):
                self._preemption.refused = request
                return
            if request.row < 0:
                continue  # its KV comes from somewhere else
            room[request.cls] = room.get(request.cls, sys.maxsize) - 1
            yield request.row

    def _begun(self) -> list[int]:
        """Rows with prompt left to compute, the most urgent first, of those the oldest."""
        rows = self.rows
        pending = rows.begun
        return sorted(pending.tolist(), key=lambda row: (self._claim(row), int(rows.serial[row])))

    def _claim(self, row: int) -> int:
        """How urgent a row is by now: what it has waited counts, so that it ends some time."""
        request = self.rows.requests[row]
        assert request is not None
        return claim_of(request, time.monotonic(), self.limits.priority_ageing)

    def _ordered(self) -> list[Request]:
        now = time.monotonic()
        ordered = self._policy.order(self.waiting, self.memory)
        ordered = aged_first(ordered, self.waiting, now, self.limits.ageing)
        return list(by_priority(ordered, now, self.limits.priority_ageing))

    def _admit(self, request: Request) -> bool:
        """Give a waiting request a row and KV for its whole prompt, if it fits; or no row yet, if
        it is worth waiting for KV to be loaded."""
        memory = self.memory
        reusable = request.tokens[: request.reusable]
        new = request.sampling.max_new_tokens - len(request.output)
        # A look first: one that does not fit must not pass for a use of what it would share.
        need = request.target - cached(request, memory, request.reusable)
        peak = self._admission.peak(need, new)
        if not self._admission.fits(memory.tree.num_locked, need, new, peak):
            return False
        if self.loading.takes(request):
            return True
        if request.explain and request.cached_tokens < 0:
            prompt = request.tokens[: request.prompt_len]
            request.divergence = memory.explain(prompt, request.namespace)
        match = memory.hold(reusable, request.namespace, request.near)
        if need != request.target - match.length:
            need = request.target - match.length
            peak = self._admission.peak(need, new)
        slots = None
        if self._admission.fits(memory.tree.num_locked, need, new, peak):
            after = int(match.slots[-1]) if match.length else -1
            slots = memory.allocate(need, match.length, after)
        if slots is None:
            memory.release(match.node, _NO_SLOTS)
            return False
        self.waiting.remove(request)
        request.admitted = request.admitted or time.monotonic()
        self._holds.take(request, match, np.concatenate((match.slots, slots)))
        claim = claim_of(request, time.monotonic(), self.limits.priority_ageing)
        self.rows.claim[request.row] = claim
        self._siblings.add(request)
        return True

    def _retract(self) -> None:
        """Send the least urgent running request (of several, that with least done) back to the
        queue; its tokens stay cached. The last one cannot be helped by that: it fails."""
        rows = self.rows
        victim = self._preemption.least_urgent()
        request = rows.requests[victim]
        assert request is not None
        if rows.running == 1:
            used = int(rows.computed[victim])
            self._holds.give_up(victim)
            self.failed.append((request, memory_full(self.memory.total, used)))
            return
        self._admission.retracted()
        self._send_back(victim)

    def _send_back(self, row: int) -> None:
        request = self.rows.requests[row]
        assert request is not None
        self._holds.give_up(row)
        request.retractions += 1
        self.num_retracted += 1
        request.overlaps.clear()
        self.waiting.insert(0, request)

    def assert_consistent(self) -> None:
        """Every slot is in exactly one set; every held node belongs to a running request."""
        running = list(self._holds.private())
        self.memory.assert_consistent([*running, *self.loading.private()])
        assert len(running) == self.rows.running
        assert all(request.row < 0 for request in self.waiting)
