"""Bounds and constants that llguidance, which reads doubles, would take for others."""

from __future__ import annotations

import itertools
from decimal import Decimal
from fractions import Fraction

import pytest
from ramet.runtime.protocol.errors import GrammarError

BOUNDS = [-1, -0.5, -1e-5, 0, 1e-5, 0.05, 0.5, 1, 1.5, 2, 2.25, 9, 9.001, 10]
TEXTS = [
    *("0", "-0", "0.0", "1", "1.0", "-1", "-1.0", "0.5", "0.50", "-0.5", "0.00001", "0.05", "0.25"),
    *("1.5", "1.25", "2", "2.0", "2.25", "2.1", "9", "9.0", "9.001", "9.0005", "10", "10.0"),
]
HUGE = 1 << 53
END = (1 << 63) - 1


def test_bounds_hold_where_they_are_near_each_other(schemas):
    for low, high in itertools.combinations(BOUNDS, 2):
        if high - low > 2:
            continue
        for least, most in (("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")):
            grammar = schemas.compile({"type": "number", least: low, most: high})
            parts = {"type": "number", "allOf": [{least: low}, {most: high}]}
            together = schemas.compile(parts)
            for text in TEXTS:
                value = float(text)
                right = low <= value <= high
                if least == "exclusiveMinimum":
                    right = low < value < high
                taken = schemas.takes(grammar, text)
                assert taken == schemas.takes(together, text), (parts, text)
                assert right or not taken, (parts, text)
                assert taken or not right or text.endswith("0"), (parts, text)


@pytest.mark.parametrize("kind", ["number", "integer"])
def test_steps_that_the_library_would_blur_are_refused_by_place(schemas, kind):
    for step in (0.07, 16.17, 0.0017):
        with pytest.raises(GrammarError, match="multiples of") as caught:
            schemas.compile({"items": {"type": kind, "multipleOf": step}})
        assert caught.value.where == "#/items/multipleOf"
    grammar = schemas.compile({"type": "number", "multipleOf": 0.00017})
    assert schemas.takes(grammar, "0.00034")
    assert not schemas.takes(grammar, "0.00035")


STEPS = [0.25, 0.125, 0.75, 0.15, 0.025, 1.25, 0.04, 0.05, 0.01, 0.5, 2.5, 0.000125]


@pytest.mark.parametrize("step", STEPS)
def test_multiples_are_taken_with_as_many_decimals_as_they_need(schemas, step):
    schema = {"type": "number", "multipleOf": step, "minimum": -3}
    whole = {"allOf": [schema, {"type": "integer"}]}
    grammar, integers = schemas.compile(schema), schemas.compile(whole)
    texts = [f"{n / 16:.4f}".rstrip("0").rstrip(".") for n in range(-60, 100)]
    texts += ["0.1", "0.2", "0.3", "0.45", "0.6", "1.1", "2.7", "0.05", "0.35", "0.04", "0.0125"]
    for text in texts:
        right = Decimal(text) >= -3 and Fraction(text) % Fraction(str(step)) == 0
        assert schemas.takes(grammar, text) == right, text
        assert schemas.takes(integers, text) == (right and "." not in text), text


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"minimum": HUGE + 1}, [str(HUGE + 2)], [str(HUGE)]),
        ({"maximum": -HUGE - 1}, [str(-HUGE - 2)], [str(-HUGE)]),
        ({"exclusiveMinimum": HUGE + 1}, [str(HUGE + 4)], [str(HUGE), str(HUGE + 1)]),
        ({"minimum": 0, "maximum": END}, ["0", str(HUGE + 1)], ["-1", str(END + 1)]),
        ({"minimum": -END - 1, "maximum": END}, ["0", "-7"], [str(END + 1), str(-END - 2)]),
        ({"minimum": -1e20, "maximum": 1e20}, ["0", "-7"], [str(10**20 + 1)]),
        ({"minimum": 3, "exclusiveMinimum": True}, ["4"], ["3"]),
        ({"minimum": 3, "exclusiveMinimum": False}, ["3"], ["2"]),
    ],
)
def test_bounds_of_large_integers(schemas, schema, valid, invalid):
    grammar = schemas.compile({"type": "integer", **schema})
    assert [text for text in valid if not schemas.takes(grammar, text)] == []
    assert [text for text in invalid if schemas.takes(grammar, text)] == []


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        ({"const": HUGE + 1}, "const"),
        ({"const": -END - 1}, "const"),
        ({"const": float(-END - 1)}, "const"),
        ({"enum": ["a", {"b": [END]}]}, "enum"),
        ({"type": "integer", "minimum": 10**20}, "minimum"),
        ({"type": "integer", "exclusiveMaximum": -(10**20)}, "exclusiveMaximum"),
    ],
)
def test_what_no_double_holds_is_refused_by_place(schemas, schema, where):
    with pytest.raises(GrammarError) as caught:
        schemas.compile({"properties": {"a": schema}})
    assert caught.value.where == f"#/properties/a/{where}"


def test_a_large_constant_that_is_a_double(schemas):
    grammar = schemas.compile({"enum": [HUGE, 10**22]})
    assert schemas.takes(grammar, str(HUGE))
    assert schemas.takes(grammar, str(10**22))
    assert not schemas.takes(grammar, str(HUGE + 1))
