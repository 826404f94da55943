"""Keywords that are said in others: what a schema takes before and after is the same."""

from __future__ import annotations

import pytest
from ramet.runtime.protocol.errors import GrammarError


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "string", "format": "made-up"}, ['"x"'], ["1"]),
        ({"type": "integer", "format": "iri"}, ["1"], ['"x"']),
        ({"type": "string", "pattern": r"^\p{Lu}\/$"}, ['"É/"'], ['"é/"']),
        ({"type": "array", "uniqueItems": False, "maxItems": 2}, ["[1,1]"], ["[1,1,1]"]),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, ["[1]"], ["[1,1]"]),
        ({"type": ["string", "null"], "not": {"type": "string"}}, ["null"], ['"a"']),
        ({"enum": [1, "a", None], "not": {"const": "a"}}, ["1", "null"], ['"a"']),
        ({"type": "integer", "not": {"minimum": 10}}, ["9", "-3"], ["10", "11"]),
        ({"type": "string", "not": {"maxLength": 2}}, ['"abc"'], ['"ab"']),
        ({"not": {"not": {"type": "null"}}}, ["null"], ["1"]),
        (
            {"type": "string", "not": {"enum": ["ab", "a\n"]}},
            ['""', '"a"', '"abc"', '"b"', '"é"', '"ab\\n"', '"a\\n\\n"'],
            ['"ab"', '"a\\n"', "1"],
        ),
        (
            {"not": {"enum": ["a", True, None]}},
            ['"b"', "false", "1", "{}"],
            ['"a"', "true", "null"],
        ),
        (
            {
                "type": "object",
                "properties": {"country": {"type": "string"}, "zip": {"type": "string"}},
                "required": ["country", "zip"],
                "additionalProperties": False,
                "if": {"properties": {"country": {"const": "US"}}},
                "then": {"properties": {"zip": {"pattern": "^[0-9]{5}$"}}},
            },
            ['{"country":"US","zip":"12345"}', '{"country":"USA","zip":"x"}'],
            ['{"country":"US","zip":"x"}', '{"country":"US","zip":"123456"}'],
        ),
        (
            {
                "oneOf": [{"type": "integer"}, {"type": "number", "minimum": 2}],
            },
            [],
            None,
        ),
        (
            {"oneOf": [{"type": "number", "maximum": 3}, {"type": "number", "minimum": 2}]},
            ["1", "4", "-7.5"],
            ["2", "3", "2.5", "null"],
        ),
        (
            {"oneOf": [{"type": "integer", "maximum": 5}, {"type": "integer", "minimum": 10}]},
            ["5", "10", "-7"],
            ["6", "9", "1.5", "null"],
        ),
        (
            {"oneOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 10}]},
            ["-1", "11"],
            ["0", "5", "10", "11.5"],
        ),
        (
            {
                "oneOf": [
                    {"type": "string", "maxLength": 2},
                    {"type": "string", "minLength": 4},
                    {"type": "array", "maxItems": 0},
                    {"type": "array", "minItems": 2},
                ]
            },
            ['"ab"', '"abcd"', "[]", "[1,2]"],
            ['"abc"', "[1]"],
        ),
        (
            {
                "oneOf": [
                    {"type": "object", "properties": {"v": {"enum": [1, 2]}}, "required": ["v"]},
                    {
                        "type": "object",
                        "properties": {"v": {"type": "integer", "minimum": 3}, "w": True},
                        "required": ["v", "w"],
                    },
                ]
            },
            ['{"v":1}', '{"v":3,"w":0}'],
            ['{"v":3}', '{"v":0}'],
        ),
        (
            {
                "oneOf": [
                    {
                        "type": "object",
                        "additionalProperties": False,
                        "properties": {"foo": {"type": "string"}, "n": {"type": "boolean"}},
                    },
                    {
                        "type": "object",
                        "additionalProperties": False,
                        "properties": {"bar": {"type": "string"}, "n": {"type": "null"}},
                    },
                ]
            },
            ['{"foo":"x"}', '{"bar":""}', '{"n":true}', '{"bar":"","n":null}'],
            ["{}", '{"foo":"x","bar":""}', '{"n":1}', '{"foo":"","n":null}', "null"],
        ),
        (
            {
                "oneOf": [
                    {
                        "type": "object",
                        "additionalProperties": False,
                        "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
                    },
                    {
                        "type": "object",
                        "additionalProperties": False,
                        "properties": {"a": {"type": "null"}},
                    },
                ]
            },
            ['{"a":null,"b":null}', '{"b":null}'],
            ["{}", '{"a":null}', '{"c":null}'],
        ),
        (
            {"type": "integer", "not": {"const": 0}, "maximum": 20},
            ["1", "-1", "10", "-20"],
            ["0", "21", "0.5"],
        ),
        (
            {"type": "number", "not": {"enum": [1, 2.5, "a"]}},
            ["0", "1.5", "2", "2.51", "3", "-1"],
            ["1", "1.0", "2.5", "2.50"],
        ),
        (
            {
                "type": "object",
                "properties": {"version": {"enum": [1, 2]}, "extra": {"type": "boolean"}},
                "required": ["version"],
                "additionalProperties": False,
                "if": {"properties": {"version": {"const": 2}}},
                "then": {"required": ["extra"]},
            },
            ['{"version":1}', '{"version":1,"extra":true}', '{"version":2,"extra":true}'],
            ['{"version":2}', '{"version":3}'],
        ),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, ['{"ab":1}'], ['{"b":1}']),
        ({"type": "object", "propertyNames": {"enum": ["a"]}}, ['{"a":1}'], ['{"b":1}']),
        (
            {
                "type": "object",
                "propertyNames": {"$ref": "#/$defs/side", "title": "Side"},
                "properties": {"left": {"type": "null"}, "up": {"type": "null"}},
                "additionalProperties": {"type": "integer"},
                "$defs": {"side": {"type": "string", "enum": ["left", "right"]}},
            },
            ['{"left":null,"right":1}', "{}", '{"right":2}'],
            ['{"left":1}', '{"up":null}', '{"a":1}', '{"right":null}'],
        ),
        (
            {"type": "object", "propertyNames": {"minLength": 2, "maxLength": 3}},
            ['{"ab":1,"é😀\\n":2}', "{}"],
            ['{"a":1}', '{"abcd":1}', '{"ab":1,"":2}'],
        ),
        (
            {"type": "object", "propertyNames": {"type": "string", "format": "uuid"}},
            ['{"123e4567-e89b-12d3-a456-426614174000":1}'],
            ['{"123e4567":1}'],
        ),
        (
            {"type": "object", "propertyNames": {"format": "date"}},
            ['{"2024-02-29":1,"2023-01-31":2,"2023-11-30":3}'],
            ['{"2023-02-29":1}', '{"2023-11-31":1}', '{"2023-13-01":1}', '{"today":1}'],
        ),
        (
            {"type": "string", "pattern": "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$"},
            ['"1"', '"-0.5"', '"+.5"', '"7."'],
            ['""', '"-"', '"."', '"+."', '"1.2.3"', '"x"'],
        ),
        (
            {"type": "object", "properties": {"a": {}, "b": {}}, "not": {"required": ["a"]}},
            ['{"b":1}', "{}"],
            ['{"a":1}'],
        ),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
                "dependentRequired": {"a": ["b"]},
                "additionalProperties": False,
            },
            ["{}", '{"b":null}', '{"a":null,"b":null}'],
            ['{"a":null}'],
        ),
        (
            {
                "if": {"type": "integer"},
                "then": {"minimum": 3},
                "else": {"type": "string"},
            },
            [],
            None,
        ),
        (
            {"if": {"type": "number"}, "then": {"minimum": 3}, "else": {"type": "string"}},
            ["3", '"a"', "4.5"],
            ["2", "null"],
        ),
        (
            {
                "oneOf": [{"$ref": "#/$defs/s"}, {"type": "null"}],
                "$defs": {"s": {"type": "string"}},
            },
            ['"a"', "null"],
            ["1"],
        ),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
                "additionalProperties": False,
                "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
            },
            ['{"a":null}', '{"b":null}'],
            ["{}", '{"a":null,"b":null}'],
        ),
    ],
)
def test_what_is_lowered(schemas, schema, valid, invalid):
    if invalid is None:  # an integer's opposite cannot be said
        with pytest.raises(GrammarError, match=next(iter(schema))):
            schemas.compile(schema)
        return
    grammar = schemas.compile(schema)
    assert [text for text in valid if not schemas.takes(grammar, text)] == []
    assert [text for text in invalid if schemas.takes(grammar, text)] == []


@pytest.mark.parametrize(
    "names",
    [
        {"$ref": "#/$defs/loop"},
        {"pattern": "a", "maxLength": 3},
        {"$ref": "#/$defs/one", "pattern": "b"},
        {"format": "email"},
        {"type": "integer"},
        False,
    ],
)
def test_names_that_nothing_can_say_are_refused(schemas, names):
    defs = {"loop": {"$ref": "#/$defs/loop"}, "one": {"pattern": "a"}}
    with pytest.raises(GrammarError, match=r"propertyNames|without end"):
        schemas.compile({"type": "object", "propertyNames": names, "$defs": defs})
