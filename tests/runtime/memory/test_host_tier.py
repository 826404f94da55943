"""Host memory's rows against a list of names in order of use."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from ramet.runtime.memory.host_tier import HostTier

ROWS = 5
names = st.integers(0, 9).map(lambda i: bytes([i]))


class HostMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.tier = HostTier(ROWS)
        self.order: list[bytes] = []
        """Oldest first."""
        self.row_of: dict[bytes, int] = {}
        self.held: list[bytes] = []
        self.taken: list[int] = []

    @rule(name=names, come_to_nothing=st.booleans())
    def put(self, name, come_to_nothing):
        full = len(self.order) + len(self.taken) == ROWS
        loose = [n for n in self.order if n not in self.held]
        row = self.tier.take()
        assert (row is None) == (full and not loose)
        if row is None:
            return
        if full:
            self.order.remove(loose[0])
            assert self.row_of.pop(loose[0]) == row, "the oldest that nobody holds makes way"
        assert row not in self.row_of.values() and row not in self.taken
        if come_to_nothing:
            self.tier.give_back(row)
            return
        self.tier.enter(name, row)
        if name not in self.order:
            self.order.append(name)
            self.row_of[name] = row

    @rule()
    def take(self):
        if len(self.taken) < 2 and len(self.order) + len(self.taken) < ROWS:
            self.taken.append(self.tier.take())

    @rule(name=names)
    def enter_what_was_taken(self, name):
        if self.taken:
            row = self.taken.pop(0)
            self.tier.enter(name, row)
            if name not in self.order:
                self.order.append(name)
                self.row_of[name] = row

    @rule(some=st.lists(names, max_size=4))
    def touch(self, some):
        self.tier.touch(some)
        for name in some:
            if name in self.order:
                self.order.remove(name)
                self.order.append(name)

    @rule(name=names)
    def hold(self, name):
        if name in self.order:
            self.tier.hold([name])
            self.held.append(name)

    @rule(data=st.data())
    def release(self, data):
        if self.held:
            name = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            self.tier.release([name])

    @rule()
    def clear(self):
        gone = [n for n in self.order if n not in self.held]
        assert self.tier.clear() == len(gone)
        for name in gone:
            self.order.remove(name)
            del self.row_of[name]

    @invariant()
    def same(self):
        self.tier.assert_consistent()
        assert list(self.tier) == self.order
        assert len(self.tier) == len(self.order)
        for name, row in self.row_of.items():
            assert name in self.tier and self.tier.row(name) == row


HostMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestHostMachine = HostMachine.TestCase


def test_a_hold_must_be_of_something_and_is_given_back_once():
    tier = HostTier(2)
    with pytest.raises(AssertionError):
        tier.hold([b"a"])
    tier.enter(b"a", tier.take())
    tier.hold([b"a"])
    tier.release([b"a"])
    with pytest.raises(AssertionError):
        tier.release([b"a"])
