"""Parameters that were right once are not looked at again; that must not mix up any two."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ramet.runtime.protocol import BadInputError, sampling_from
from ramet.runtime.protocol import sampling as module

values = st.one_of(
    st.none(), st.booleans(), st.sampled_from([0, 1, 2, 0.0, 1.0, 0.5]), st.sampled_from(["", "a"])
)
names = st.sampled_from(["temperature", "top_k", "n", "stop", "ignore_eos", "max_tokens", "seed"])
layers = st.lists(st.dictionaries(names, values, max_size=3), min_size=1, max_size=2)


def outcome(make, given):
    try:
        return make(given)
    except BadInputError as error:
        return str(error)


@given(st.lists(layers, min_size=1, max_size=8))
def test_the_same_with_and_without_memory(many):
    for given_layers in many:
        fresh = outcome(module._checked, tuple(given_layers))
        assert outcome(lambda g: sampling_from(*g), given_layers) == fresh
        assert outcome(lambda g: sampling_from(*g), given_layers) == fresh


def test_equal_values_of_other_types_are_other_values():
    assert sampling_from({"n": 1}).n == 1
    with pytest.raises(BadInputError, match="n"):
        sampling_from({"n": True})
    with pytest.raises(BadInputError, match="top_k"):
        sampling_from({"top_k": 1.5})


def test_a_boundary_between_layers_is_none_within_one():
    assert sampling_from({"temperature": 0.5}, {"n": 2}) == sampling_from(
        {"temperature": 0.5, "n": 2}
    )
    assert sampling_from({"stop": "a"}, {"stop": "b"}).stop == ("b",)
    with pytest.raises(BadInputError, match="one constraint"):
        sampling_from({"regex": "a", "ebnf": "b"})
    assert sampling_from({"regex": "a"}, {"ebnf": "b"}).constraint.kind == "ebnf"


def test_the_memory_is_small():
    for i in range(3 * module._MOST_KNOWN):
        sampling_from({"seed": i})
    assert len(module._known) <= module._MOST_KNOWN
    before = dict(module._known)
    sampling_from({"stop": "x" * (module._LONGEST_KNOWN + 1)})
    sampling_from({"stop": ["x"]})
    sampling_from({"logit_bias": {"1": 2.0}})
    assert module._known == before
