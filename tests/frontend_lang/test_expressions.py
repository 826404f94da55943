from __future__ import annotations

import json

import pytest
import ramet as rt
from ramet.expressions import Concat, GenExpression, RoleExpression, SelectExpression


def test_concatenation_is_flat_and_in_order():
    expr = "a" + rt.gen("x") + "b" + rt.select("y", ["1"]) + "c"
    assert isinstance(expr, Concat)
    assert [type(item).__name__ for item in expr.items] == [
        "str",
        "GenExpression",
        "str",
        "SelectExpression",
        "str",
    ]


def test_gen_keeps_only_what_was_given():
    expr = rt.gen("x", max_tokens=3, stop="\n", temperature=0)
    assert isinstance(expr, GenExpression)
    assert expr.sampling == {"max_new_tokens": 3, "stop": "\n", "temperature": 0}
    assert rt.gen("x", 7).sampling == {"max_new_tokens": 7}  # pyright: ignore


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"max_tokens": -1}, "max_new_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n"),
        ({"stop": [""]}, "stop"),
        ({"stop": 3}, "stop"),
        ({"max_tokens": "many"}, "max_new_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_new_tokens"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"dtype": complex}, "dtype"),
        ({"name": 3}, "name"),
        ({"constrained": True}, "choices"),
    ],
)
def test_bad_arguments_name_themselves_and_the_line(arguments: dict, named: str):
    with pytest.raises(rt.BadInputError) as caught:
        rt.gen(**arguments)
    assert caught.value.param == named
    assert "test_expressions.py:" in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "name", ["stop_regex", "images", "beam_size", "separate_reasoning", "max_token"]
)
def test_unknown_arguments_are_type_errors(name: str):
    with pytest.raises(TypeError, match=name):
        rt.gen("x", **{name: 1})
    with pytest.raises(TypeError, match=name):
        rt.gen_int("x", **{name: 1})


@pytest.mark.parametrize("choices", [[], (), None, "abc", [1], ["a", None], 3])
def test_bad_choices(choices: object):
    with pytest.raises(ValueError, match="choices"):
        rt.select("x", choices)  # pyright: ignore


def test_select_checks_its_arguments():
    with pytest.raises(ValueError, match="temperature"):
        rt.select("x", ["a"], temperature=1.0)
    with pytest.raises(ValueError, match="choices_method"):
        rt.select("x", ["a"], choices_method="best")  # pyright: ignore
    with pytest.raises(ValueError, match="boundary"):
        rt.select("x", ["a"], boundary="none")  # pyright: ignore


def test_gen_with_choices_selects():
    expr = rt.gen("x", choices=["a", "b"], choices_method=rt.greedy_token_selection)
    assert isinstance(expr, SelectExpression)
    assert expr.method == "greedy_token_selection"
    with pytest.raises(ValueError, match="empty"):
        rt.gen("x", choices=[])


def test_constrained_choices_generate():
    expr = rt.gen("x", choices=["a", "b"], constrained=True)
    assert isinstance(expr, GenExpression)
    assert expr.sampling["constraint"] == {"kind": "choice", "spec": '["a", "b"]'}


def test_dtype_becomes_a_regex_and_stops():
    expr = rt.gen_int("x", stop=".")
    assert isinstance(expr, GenExpression)
    assert expr.type is not None
    assert expr.type.parse("12") == 12
    assert expr.sampling["constraint"]["kind"] == "regex"
    assert expr.sampling["stop"] == (".", " ", "\n")
    assert rt.gen("x", dtype="float").type.name == "float"  # pyright: ignore
    assert rt.gen_string("x").type.name == "str"  # pyright: ignore
    with pytest.raises(TypeError, match="dtype"):
        rt.gen_int("x", dtype=str)


def test_constraints_exclude_each_other():
    with pytest.raises(ValueError, match="regex and json_schema"):
        rt.gen("x", regex="a", json_schema="{}")
    with pytest.warns(UserWarning, match="dtype wins"):
        expr = rt.gen("x", regex="a", dtype=int)
    assert expr.sampling["constraint"]["spec"] != "a"  # pyright: ignore


@pytest.mark.parametrize(
    "other", [{"regex": "a"}, {"dtype": int}, {"json_schema": "{}"}, {"grammar": "root ::= 'a'"}]
)
@pytest.mark.parametrize("constrained", [False, True])
def test_choices_are_a_constraint_however_they_are_chosen(other: dict, constrained: bool):
    (name,) = other
    with pytest.raises(rt.BadInputError, match="at most one constraint") as caught:
        rt.gen("x", choices=["a", "b"], constrained=constrained, **other)
    assert name in str(caught.value)
    assert "choices" in str(caught.value)


def test_json_schema_takes_text_dicts_and_models():
    class Model:
        @staticmethod
        def model_json_schema():
            return {"type": "integer"}

    for schema in ('{"type": "integer"}', {"type": "integer"}, Model):
        expr = rt.gen("x", json_schema=schema)
        assert json.loads(expr.sampling["constraint"]["spec"]) == {"type": "integer"}  # pyright: ignore
    with pytest.raises(rt.GrammarError, match="not JSON"):
        rt.gen("x", json_schema="{")


def test_json_may_have_blanks():
    expr = rt.gen("x", json_schema={"type": "array"}, whitespace="flexible")
    assert expr.sampling["constraint"]["whitespace"] == "flexible"  # pyright: ignore
    with pytest.raises(ValueError, match="whitespace must be"):
        rt.gen("x", json_schema={}, whitespace="much")  # pyright: ignore
    with pytest.raises(ValueError, match="whitespace needs"):
        rt.gen("x", regex="a", whitespace="flexible")


def test_roles_check_their_bodies():
    for role in (rt.system, rt.user, rt.assistant):
        assert isinstance(role("x"), RoleExpression)
        with pytest.raises(ValueError, match="None"):
            role(None)  # pyright: ignore
    with pytest.raises(ValueError, match="int"):
        "a" + rt.gen("x") + 3  # pyright: ignore
