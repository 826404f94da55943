"""`heal` as programs write it: who gets it, and who cannot do it."""

from __future__ import annotations

import pytest
import ramet as rt
from ramet.testing import ScriptedBackend


@rt.function
def program(s: rt.State, heal: bool):
    s += "The capital of Fra" + rt.gen("x", max_tokens=4, heal=heal)


@pytest.mark.parametrize("heal", [True, False])
def test_a_backend_is_told(heal: bool):
    backend = ScriptedBackend({"x": "nce"})
    state = program.run(heal=heal, backend=backend)
    assert state.text() == "The capital of France"
    (call,) = backend.calls
    assert call.sampling is not None
    assert call.sampling.heal is heal


def test_a_run_may_ask_for_all_its_gens():
    @rt.function
    def two(s: rt.State):
        s += "a" + rt.gen("x") + "b" + rt.gen_string("y", heal=False) + rt.gen_int("z")

    backend = ScriptedBackend({"x": "1", "y": '"2"', "z": "3"})
    two.run(backend=backend, heal=True).sync()
    assert [call.sampling.heal for call in backend.calls if call.sampling] == [True, False, True]


@pytest.mark.parametrize("value", [1, "yes", [True]])
def test_it_is_on_or_off(value: object):
    with pytest.raises(rt.BadInputError, match="heal") as caught:
        rt.gen("x", heal=value)  # pyright: ignore[reportArgumentType]
    assert caught.value.param == "heal"
    assert "test_healing_language.py:" in str(caught.value)


def test_choices_that_are_scored_have_an_exact_boundary_already():
    with pytest.raises(rt.BadInputError, match="choices are scored") as caught:
        rt.gen("x", choices=["a", "b"], heal=True)
    assert caught.value.param == "heal"
    rt.gen("x", choices=["a", "b"], heal=False)
    rt.gen("x", choices=["a", "b"], constrained=True, heal=True)


@pytest.mark.parametrize("roles", [False, True])
def test_a_server_of_another_kind_cannot(roles: bool):
    @rt.function
    def asked(s: rt.State):
        if roles:
            s += rt.user("q")
            s += rt.assistant(rt.gen("x", heal=True))
        else:
            s += "q" + rt.gen("x", heal=True)

    backend = rt.OpenAI("model", "http://127.0.0.1:1/v1", api_key="none")
    try:
        state = asked.run(backend=backend)
        with pytest.raises(rt.RametError, match="heal needs a runtime"):
            state["x"]
    finally:
        backend.shutdown()
