"""What is wrong with a schema is said by keyword and path, before anything compiles it."""

from __future__ import annotations

import json

import pytest
from ramet.runtime.grammar.checks import MAX_CHARACTERS, check_spec
from ramet.runtime.grammar.spec import Spec
from ramet.runtime.protocol.errors import GrammarError

IN_A = "#/properties/a"


def _error(schema) -> GrammarError:
    with pytest.raises(GrammarError) as caught:
        check_spec(Spec.of("json_schema", schema))
    assert len(str(caught.value)) < 400
    return caught.value


@pytest.mark.parametrize(
    ("schema", "word", "where"),
    [
        ({"type": "strin"}, "strin", "/type"),
        ({"type": []}, "type", "/type"),
        ({"type": ["string", 3]}, "type", "/type"),
        ({"properties": ["a"]}, "properties", "/properties"),
        ({"properties": {"b": 3}}, "schema", "/properties/b"),
        ({"properties": {"b/c~": "x"}}, "schema", "/properties/b~1c~0"),
        ({"items": "x"}, "items", "/items"),
        ({"anyOf": {}}, "anyOf", "/anyOf"),
        ({"anyOf": []}, "anyOf", "/anyOf"),
        ({"oneOf": [3]}, "schema", "/oneOf/0"),
        ({"enum": "x"}, "enum", "/enum"),
        ({"required": "x"}, "required", "/required"),
        ({"required": [1]}, "required", "/required"),
        ({"minLength": -1}, "minLength", "/minLength"),
        ({"maxItems": 1.5}, "maxItems", "/maxItems"),
        ({"minimum": "0"}, "minimum", "/minimum"),
        ({"multipleOf": 0}, "multipleOf", "/multipleOf"),
        ({"pattern": 3}, "pattern", "/pattern"),
        ({"pattern": "a(?=b)"}, "look-ahead", "/pattern"),
        ({"pattern": "x|(?:(?<!a)b)+"}, "look-behind", "/pattern"),
        ({"pattern": r"(a)\1"}, "backreference", "/pattern"),
        ({"pattern": r"\bword"}, "boundary", "/pattern"),
        ({"patternProperties": {"(?!x)": {}}}, "look-ahead", "/patternProperties/(?!x)"),
        ({"$ref": 3}, "$ref", "/$ref"),
        ({"$ref": "https://example.com/other.json"}, "not in the schema", "/$ref"),
        ({"$ref": "other.json#/x"}, "not in the schema", "/$ref"),
        ({"$ref": "#/$defs/nothing"}, "leads to nothing", "/$ref"),
        ({"$ref": "#nothing"}, "leads to nothing", "/$ref"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems", "/uniqueItems"),
        ({"type": "array", "contains": {"type": "null"}}, "contains", "/contains"),
        ({"type": "string", "not": {"pattern": "x"}}, "not", "/not"),
        ({"unevaluatedProperties": False}, "unevaluatedProperties", "/unevaluatedProperties"),
        ({"type": "string", "format": "iri"}, "iri", "/format"),
        ({"type": "object", "minProperties": 3}, "minProperties", "/minProperties"),
    ],
)
def test_by_keyword_and_path(schema, word, where):
    error = _error({"type": "object", "properties": {"a": schema}})
    assert word in error.message
    assert error.where == IN_A + where


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"allOf": [True, False]},
        {"enum": []},
        {"not": {}},
    ],
)
def test_no_value_can_match(schema):
    assert "match" in _error(schema).message or "without end" in _error(schema).message


@pytest.mark.parametrize(
    "text",
    ["", "{", '{"type": "string",}', "{'a': 1}", "nul", "NaN", '{"minimum": Infinity}',
     '{"minimum": 1e999}', f'{{"minimum": {"9" * 5000}}}', "[" * 100_000, '"a"', "3", "[]"],
)  # fmt: skip
def test_what_is_no_json_or_no_schema(text):
    assert _error(text)


def test_size_and_nesting_are_bounded():
    assert (
        "characters" in _error(json.dumps({"title": "x" * MAX_CHARACTERS["json_schema"]})).message
    )
    deep: object = True
    for _ in range(200):
        deep = {"allOf": [deep]}
    assert "deep" in _error(deep).message
    assert "subschemas" in _error({"anyOf": [{"title": "x"} for _ in range(31_000)]}).message


def test_a_message_does_not_hold_the_schema():
    long = "x" * 5000
    assert len(str(_error({"$ref": f"#/{long}"}))) < 300
    assert len(str(_error({"properties": {long: 3}}))) < 300
    assert len(str(_error({"type": long}))) < 300


def test_half_a_character_is_refused():
    with pytest.raises(GrammarError, match="surrogate"):
        Spec.of("json_schema", '{"const": "\ud800"}')
    assert "surrogate" in _error('{"properties": {"\\uD83D": {}}}').message
    check_spec(Spec.of("json_schema", '{"const": "\\ud83d\\ude00"}'))


def test_a_schema_cannot_choose_to_be_read_loosely(schemas):
    schema = {"type": "array", "contains": {"type": "null"}, "x-guidance": {"lenient": True}}
    with pytest.raises(GrammarError, match="contains"):
        schemas.compile(schema)
    schema = {"type": "array", "x-guidance": {"whitespace_flexible": True}}
    assert not schemas.takes(schemas.compile(schema), "[1, 2]")


def test_an_escaped_spelling_of_a_name_is_not_another_name(schemas):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    grammar = schemas.compile(schema)
    assert schemas.takes(grammar, '{"a":1,"b":"x"}')
    assert not schemas.takes(grammar, '{"\\u0061":"x"}')
    closed = schemas.compile({**schema, "additionalProperties": False})
    assert not schemas.takes(closed, '{"\\u0061":"x"}')
    assert schemas.takes(schemas.compile({"type": "string"}), '"\\u00e9\\ud83d\\ude00"')


def test_rules_that_lead_nowhere_are_not_entered(schemas):
    endless = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}
    schema = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}], "$defs": {"n": endless}}
    grammar = schemas.compile(schema)
    assert schemas.takes(grammar, "null")
    assert not grammar.matcher().accept(ord("{"))


def test_options_that_may_hold_together_are_refused_by_path(schemas):
    options = [{"type": "array", "items": {"type": kind}} for kind in ("integer", "string")]
    with pytest.raises(GrammarError, match="oneOf") as caught:
        schemas.compile({"type": "object", "properties": {"a": {"oneOf": options}}})
    assert caught.value.where == "#/properties/a/oneOf"
    assert "coerce" not in str(caught.value)
