"""Names that are not there are named, and what was probably meant beside them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import ramet as rt

call: Any = rt


@rt.function
def greet(s, topic, greeting="Hello"):
    s += f"{greeting}, {topic}" + rt.gen("x")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: call.gen("x", max_token=4),
            "gen() got an unexpected keyword argument 'max_token'; did you mean max_tokens?",
        ),
        (lambda: call.gen("x", max_new_tokens=4), "'max_new_tokens'; did you mean max_tokens?"),
        (lambda: call.gen("x", min_new_tokens=4), "did you mean min_tokens?"),
        (lambda: call.gen("x", sampling_seed=4), "did you mean seed?"),
        (lambda: call.gen_int("x", temprature=0), "did you mean temperature?"),
        (
            lambda: call.select("x", ["a"], choice_method="greedy_token_selection"),
            "select() got an unexpected keyword argument 'choice_method'; did you mean choices_m",
        ),
        (lambda: call.gen("x", stop_regex="a"), "'stop_regex'"),
    ],
)
def test_arguments_of_expressions(make: Callable[[], Any], says: str):
    with pytest.raises(TypeError, match=re.escape(says)) as caught:
        make()
    assert isinstance(caught.value, rt.BadInputError)
    assert "test_misspelt.py:" in str(caught.value)


def test_what_is_like_nothing_is_only_named():
    with pytest.raises(TypeError, match="'images'") as caught:
        call.gen("x", images=[])
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"qq": "a"}, "missing a required argument: 'topic', and got an unexpected .* 'qq'$"),
        ({"topci": "a"}, "'topic', and got .* 'topci'; did you mean topic\\?"),
        ({"topic": "a", "temprature": 0}, "'temprature'; did you mean temperature\\?"),
        ({"topic": "a", "max_newtokens": 0}, "did you mean max_new_tokens\\?"),
        ({"topic": "a", "strem": True}, "did you mean stream\\?"),
    ],
)
def test_arguments_of_runs(scripted, given: dict[str, Any], says: str):
    with pytest.raises(TypeError, match=says):
        greet.run(backend=scripted(), **given)


def test_arguments_of_batches(scripted):
    run: Any = greet.run_batch
    with pytest.raises(TypeError, match=r"item 0 of the batch: .*'topci'; did you mean topic\?"):
        run([{"topci": "a"}], backend=scripted())
    with pytest.raises(TypeError, match=r"'temprature'; did you mean temperature\?"):
        run([{"topic": "a"}], backend=scripted(), temprature=0)
    with pytest.raises(TypeError, match=r"'num_thread'; did you mean num_threads\?"):
        run([{"topic": "a"}], backend=scripted(), num_thread=1)


def test_arguments_of_compiled_programs(scripted):
    compiled = greet.compile()
    with pytest.raises(ValueError, match=r"'topic'; 'topci' .*unknown; did you mean topic\?"):
        compiled.run(topci="a", backend=scripted())
    with pytest.raises(ValueError, match=r"'temprature' .*did you mean temperature\?"):
        compiled.run("a", temprature=0, backend=scripted())


def test_bound_arguments():
    with pytest.raises(TypeError, match=r"no parameter 'topci'; did you mean topic\?"):
        greet.bind(topci="a")


def test_any_keyword_is_an_argument_where_the_function_takes_any(scripted):
    @rt.function
    def f(s, topic, **more):
        s += f"{topic} {sorted(more)}"

    assert f.run("a", temprature=0, backend=scripted()).text() == "a ['temprature']"
    with pytest.raises(TypeError, match=r"'topic'$"):
        f.run(temprature=0, backend=scripted())
