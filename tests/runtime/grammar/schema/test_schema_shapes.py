"""Every keyword of JSON Schema 2020-12, alone and beside others, on one pool of values.

What is valid is jsonschema's to say. Nothing invalid may be taken; what share of the schemas is
all right, with every valid value taken too, is printed.
"""

from __future__ import annotations

from typing import Any

import jsonschema
from ramet.runtime.protocol.errors import GrammarError

POOL: list[Any] = [
    None, True, False, 0, 1, 2, 3, -1, 7, 10, 100, 1.5, 2.5, -0.5, 3.25, 12345678910,
    "", "a", "b", "foo", "bar", "aaa", "foobar", "é", "😀😀", "a\nb", "x\"y", "1", "ab12", "  ",
    "2020-01-01", "1963-06-19T08:30:06Z", "08:30:06Z", "joe@example.com", "127.0.0.1", "::1",
    "2eb8aa08-aa98-11ea-b4aa-73b441d16380", "http://foo.bar/baz", "P4DT12H30M5S",
    [], [1], [1, 2], [1, 2, 3], [1, 2, 3, 4], ["a"], ["a", 1], [1, "a"], [1, 1], [None], [True],
    [[1], [2]], [{"foo": 1}], [{"a": 1}, {"a": 1}], [[]], [1, "foo", None], ["foo", "bar"],
    {}, {"foo": 1}, {"foo": "a"}, {"bar": 2}, {"foo": 1, "bar": 2}, {"foo": "a", "bar": "b"},
    {"foo": 1, "bar": 2, "baz": 3}, {"foo": None}, {"foo": [1]}, {"foo": {"bar": 1}}, {"fooo": 1},
    {"a": 1, "b": 2}, {"foo": {}}, {"foo": {"foo": {"foo": {}}}}, {"quux": "x"}, {"foo\nbar": 1},
    {"foo\"bar": 1}, {"é": 1}, {"$ref": "a"}, {"kind": "circle", "r": 1}, {"kind": "rect", "w": 1},
]  # fmt: skip

INT, STR, NULL, OBJ = ({"type": t} for t in ("integer", "string", "null", "object"))
FOO = {"properties": {"foo": INT}}
CLOSED = {"additionalProperties": False}

SHAPES: list[Any] = [
    # types and values
    True, {}, *({"type": t} for t in ("integer", "number", "string", "object", "array", "boolean")),
    NULL, {"type": ["integer", "string"]}, {"type": ["object", "array", "null"]},
    {"enum": [1, 2, 3]}, {"enum": [6, "foo", [], True, {"foo": 12}]}, {"enum": [None]},
    {"enum": [[False]]}, {"enum": [False]}, {"enum": [0]}, {"enum": ["a\nb", 'x"y', "é"]},
    {"const": 2}, {"const": {"foo": 1, "bar": 2}}, {"const": [{"foo": 1}]}, {"const": None},
    {"const": False}, {"const": -0.5}, {"type": "string", "enum": ["a", 1, None]},
    # numbers
    {"minimum": 1.1}, {"minimum": -2}, {"maximum": 3.0}, {"maximum": 300}, {"multipleOf": 2},
    {"exclusiveMinimum": 1.1}, {"exclusiveMaximum": 3.0}, {"multipleOf": 1.5},
    {"type": "integer", "minimum": 1, "maximum": 10}, {"type": "integer", "multipleOf": 5},
    {"type": "number", "minimum": -1, "exclusiveMaximum": 2.5}, {"minimum": 0, "maximum": 0},
    # strings
    {"maxLength": 2}, {"minLength": 2}, {"type": "string", "minLength": 1, "maxLength": 1},
    {"pattern": "^a*$"}, {"pattern": "a+"}, {"pattern": "^[a-z0-9]{2,4}$"}, {"pattern": "\\d"},
    {"type": "string", "pattern": "^é|o$"}, {"pattern": "^.{2}$", "type": "string"},
    {"type": "string", "pattern": "b", "maxLength": 4}, {"pattern": "^\\S(|(.|\\n)*\\S)$"},
    # arrays
    {"items": INT}, {"type": "array", "items": STR}, {"items": True}, {"items": False},
    {"prefixItems": [INT, STR]}, {"prefixItems": [True, False]},
    {"prefixItems": [INT], "items": False}, {"prefixItems": [{}, {}, {}], "items": False},
    {"prefixItems": [INT, STR], "items": NULL}, {"maxItems": 2}, {"minItems": 1},
    {"type": "array", "minItems": 2, "maxItems": 3}, {"items": {"items": INT}},
    {"type": "array", "items": {"properties": {"foo": INT}, "required": ["foo"]}},
    {"items": {"type": ["null", "integer"]}, "minItems": 1}, {"maxItems": 0, "type": "array"},
    {"type": "array", "uniqueItems": True}, {"uniqueItems": False}, {"contains": {"minimum": 5}},
    {"contains": INT, "minContains": 2}, {"unevaluatedItems": False},
    # objects
    FOO, {"properties": {"foo": INT, "bar": STR}}, {"properties": {"foo": False}},
    {"properties": {"foo\nbar": INT, 'foo"bar': INT, "é": INT}}, {"properties": {"$ref": STR}},
    {"properties": {"foo": NULL}}, {**FOO, **CLOSED}, {**FOO, "additionalProperties": INT},
    {"additionalProperties": INT}, {"additionalProperties": False}, {"type": "object", **CLOSED},
    {"required": ["foo"]}, {**FOO, "required": ["foo", "bar"]}, {"required": []},
    {"required": ['foo"bar']}, {**FOO, **CLOSED, "required": ["foo"]},
    {"patternProperties": {"f.*o": INT}}, {"patternProperties": {"^f": INT, "b": False}},
    {"patternProperties": {"^foo$": {}}, **CLOSED}, {**FOO, "patternProperties": {"^b": INT}},
    {"minProperties": 1}, {"maxProperties": 2}, {"maxProperties": 0, "type": "object"},
    {"type": "object", "minProperties": 2}, {"minProperties": 1, "maxProperties": 1},
    {**FOO, "required": ["foo"], "minProperties": 2}, {"propertyNames": {"maxLength": 3}},
    {"propertyNames": {"pattern": "^fo+$"}}, {"propertyNames": False}, {"propertyNames": True},
    {"propertyNames": {"enum": ["foo", "bar"]}}, {"dependentRequired": {"bar": ["foo"]}},
    {"dependentRequired": {"foo": ["bar", "baz"], "bar": []}}, {"dependentSchemas": {"foo": FOO}},
    {"dependentSchemas": {"bar": {"required": ["foo"]}}}, {"unevaluatedProperties": False},
    # combined
    {"allOf": [FOO, {"required": ["bar"]}]}, {"allOf": [{"minimum": 2}, {"maximum": 10}]},
    {"allOf": [True, True]}, {"allOf": [True, False]}, {"allOf": [{"minLength": 2}, STR]},
    {"allOf": [{"properties": {"foo": INT}}, {"properties": {"foo": {"minimum": 2}}}]},
    {"anyOf": [INT, {"minimum": 2}]}, {"anyOf": [INT, STR]}, {"anyOf": [False, NULL]},
    {"type": "string", "anyOf": [{"maxLength": 2}, {"minLength": 4}]},
    {"anyOf": [{**FOO, "required": ["foo"]}, {"properties": {"bar": STR}, "required": ["bar"]}]},
    {"oneOf": [INT, STR]}, {"oneOf": [INT, {"minimum": 2}]}, {"oneOf": [True, False]},
    {"oneOf": [{"required": ["foo"]}, {"required": ["bar"]}], "type": "object"},
    {"oneOf": [{"properties": {"kind": {"const": k}, p: INT}, "required": ["kind", p], **OBJ}
               for k, p in (("circle", "r"), ("rect", "w"))]},
    {"not": INT}, {"not": STR}, {"not": {"type": ["integer", "boolean"]}}, {"not": True},
    {"not": False}, {"not": {"required": ["foo"]}}, {"not": {"not": {"type": "array"}}},
    {"not": {"type": "object", "properties": {"foo": STR}}},
    {"type": "number", "not": {"minimum": 2}},
    {"not": {"anyOf": [STR, {"type": "number"}]}}, {"not": {"minItems": 1}},
    {"if": {"type": "string"}, "then": {"minLength": 2}}, {"if": {"const": 1}, "then": False},
    {"if": {"maximum": 0}, "then": {"minimum": -10}, "else": {"minimum": 2}}, {"then": False},
    {"if": {"required": ["foo"]}, "then": {"required": ["bar"]}, "type": "object"},
    # references
    {"$ref": "#/$defs/a", "$defs": {"a": INT}},
    {"$ref": "#a", "$defs": {"x": {"$anchor": "a", **STR}}},
    {"properties": {"foo": {"$ref": "#"}}, **CLOSED}, {"items": {"$ref": "#"}, "type": "array"},
    {"$ref": "#/$defs/a~1b", "$defs": {"a/b": NULL}},
    {"$ref": "#/$defs/a%25b", "$defs": {"a%b": INT}},
    {"prefixItems": [INT, {"$ref": "#/prefixItems/0"}]},
    {"$ref": "#/$defs/a", "$defs": {"a": True}},
    {"properties": {"foo": {"$ref": "#/$defs/d"}}, "$defs": {"d": {"$ref": "#/$defs/e"}, "e": INT}},
    {"$id": "http://x.test/root", "$ref": "leaf", "$defs": {"l": {"$id": "leaf", **STR}}},
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array"}}, "maxItems": 2},
    {"$dynamicRef": "#a", "$defs": {"x": {"$dynamicAnchor": "a", **STR}}},
    # annotations say nothing
    {"title": "t", "description": "d", "default": 1, "examples": [1], "x-mine": 1, **INT},
    {"$comment": "c", "deprecated": True, "readOnly": True, "contentEncoding": "base64", **STR},
    {"format": "made-up"}, {"type": "integer", "format": "date"},
]  # fmt: skip


def test_no_shape_lets_anything_invalid_through(schemas):
    right = refused = 0
    strict: list[Any] = []
    for shape in SHAPES:
        oracle = jsonschema.Draft202012Validator(shape)
        try:
            grammar = schemas.compile(shape)
        except GrammarError:
            refused += any(map(oracle.is_valid, POOL))
            right += not any(map(oracle.is_valid, POOL))
            continue
        missed = []
        for value in POOL:
            texts = schemas.texts(value)
            taken = any(schemas.takes(grammar, text) for text in texts)
            valid = oracle.is_valid(value)
            assert valid or not taken, f"unsound: {shape} takes {texts[0]}"
            if valid and not taken:
                missed.append(value)
        right += not missed
        if missed:
            strict.append((shape, missed))
    share = 100 * right / len(SHAPES)
    print(f"\n{right} of {len(SHAPES)} shapes all right ({share:.0f} %), {refused} refused")
    for shape, missed in strict:
        print(f"  too strict: {shape} misses {missed[:4]}")
    assert share >= 88
    assert not strict


FORMATS = {
    "date": (
        ["2020-01-31", "2024-02-29", "2000-02-29", "1999-11-30"],
        ["2020-13-01", "2020-1-1", "x", "2023-02-29", "1900-02-29", "2024-02-30", "2024-04-31"],
    ),
    "date-time": (
        ["1963-06-19T08:30:06Z", "1990-12-31T23:59:50+01:00", "2016-12-31t23:59:60.5z"],
        ["1963-06-19", "x", "2023-02-29T00:00:00Z", "1998-12-31T23:58:60Z", "1998-12-31T22:59:60Z"],
    ),
    "time": (["08:30:06Z", "23:59:60+00:00"], ["8:30", "25:00:00Z", "12:00:60Z", "23:59:61Z"]),
    "email": (["joe@example.com"], ["joe", "@x"]),
    "ipv4": (["192.168.0.1"], ["256.0.0.1", "1.2.3"]),
    "ipv6": (["::1", "2001:db8::ff00:42:8329"], ["12345::", "x"]),
    "uuid": (["2eb8aa08-aa98-11ea-b4aa-73b441d16380"], ["2eb8aa08", "x"]),
    "hostname": (["www.example.com"], ["-a-host", "a_b.c d"]),
    "uri": (["http://foo.bar/baz?q=1#x"], ["foo bar", "//a"]),
    "duration": (["P4DT12H30M5S", "P1Y"], ["PT", "4D"]),
}


def test_formats_are_enforced(schemas):
    for name, (valid, invalid) in FORMATS.items():
        grammar = schemas.compile({"type": "string", "format": name})
        assert [t for t in valid if not schemas.takes(grammar, f'"{t}"')] == [], name
        assert [t for t in invalid if schemas.takes(grammar, f'"{t}"')] == [], name
