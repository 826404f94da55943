"""How to test a prompt program without a model: `ScriptedBackend` answers in its place.

pytest examples/unit_test.py     runs the tests
python examples/unit_test.py     runs the program with the model
"""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import ramet as rt


@rt.function
def support(s: Any, message: str) -> None:
    """Sort a customer's message; only complaints get an apology."""
    s += f"Message: {message}\nKind: " + rt.select("kind", ["question", "complaint"])
    if s["kind"] == "complaint":
        s += "\nReply: We are sorry that" + rt.gen("reply", max_tokens=32, stop="\n")
    else:
        s += "\nReply:" + rt.gen("reply", max_tokens=32, stop="\n")


def test_only_a_complaint_gets_an_apology() -> None:
    backend = rt.testing.ScriptedBackend({"kind": "complaint", "reply": " it broke.\nBye"})
    state = support.run("The cup broke.", backend=backend)
    assert state.text().endswith("Reply: We are sorry that it broke.")  # cut at the stop string

    backend = rt.testing.ScriptedBackend({"kind": "question", "reply": " At nine."})
    state = support.run("When do you open?", backend=backend)
    assert state.text().endswith("Reply: At nine.")


def test_what_the_model_is_asked() -> None:
    backend = rt.testing.ScriptedBackend({"kind": 0, "reply": " At nine."})
    support.run("When do you open?", backend=backend, temperature=0)
    first, second = backend.calls
    assert first.prompt == "Message: When do you open?\nKind: "
    assert first.choices == ("question", "complaint")
    assert second.sampling is not None
    assert second.sampling.max_new_tokens == 32


def test_answers_in_order_of_the_calls() -> None:
    backend = rt.testing.ScriptedBackend({"kind": ["question", "complaint"], "reply": " yes"})
    kinds = [support.run(text, backend=backend)["kind"] for text in ("Open?", "It broke.")]
    assert kinds == ["question", "complaint"]


def test_an_error_of_the_backend_is_raised_where_the_value_is_read() -> None:
    backend = rt.testing.ScriptedBackend(
        {"kind": "question", "reply": rt.BackendError("the engine is gone")}
    )
    state = support.run("Open?", backend=backend)
    assert state["kind"] == "question"
    with pytest.raises(rt.BackendError, match="the engine is gone"):
        state["reply"]


def main(backend: rt.Backend) -> None:
    state = support.run("The cup I ordered came broken.", backend=backend, temperature=0)
    print(state.text())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", help="a running server; otherwise one is embedded")
    url = parser.parse_args().backend
    with rt.RuntimeEndpoint(url) if url else rt.Runtime() as runtime:
        main(runtime)
