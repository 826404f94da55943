"""Python types as constraints and back."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
import subprocess
import sys
from typing import Annotated, Any, Literal, NewType, NotRequired, TypedDict

import jsonschema
import pydantic
import pytest
from ramet.runtime.program.json_types import json_schema_of
from ramet.runtime.program.json_values import value_from_json
from ramet.runtime.program.typed import typed, typed_json
from ramet.runtime.protocol.errors import BadInputError


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Opaque(enum.Enum):
    A = object()
    B = ()


@dataclasses.dataclass
class Point:
    x: int
    y: float = 0.5
    tags: list[str] = dataclasses.field(default_factory=list)
    hidden: int = dataclasses.field(default=3, init=False)


@dataclasses.dataclass
class Tree:
    value: int
    children: list[Tree]
    colour: Colour | None = None


class Movie(TypedDict):
    title: str
    year: NotRequired[int]


class Person(pydantic.BaseModel):
    name: str
    age: int = pydantic.Field(ge=0)
    friend: Person | None = None
    colour: Colour = Colour.RED


@dataclasses.dataclass
class Party:
    host: Person
    guests: list[Person]
    at: Point


Id = NewType("Id", int)


@pytest.mark.parametrize(
    ("type_", "text", "value"),
    [
        (int, "-12 ", -12),
        ("int", "+7\n", 7),
        (float, ".5", 0.5),
        (float, "-3.25", -3.25),
        (bool, "True", True),
        (bool, "False", False),
        (str, '"two words"', "two words"),
        (str, '"naïve 日本"', "naïve 日本"),
    ],
)
def test_scalars_are_regexes_that_take_what_they_parse(type_, text, value):
    made = typed(type_)
    assert made.kind == "regex"
    assert re.fullmatch(made.spec, text)
    result = made.parse(text)
    assert result == value and type(result) is type(value)


@pytest.mark.parametrize(
    ("type_", "text"),
    [(int, ""), (int, "1.5"), (float, "x"), (bool, "true"), (str, '"cut'), (Literal["a"], "b")],
)
def test_text_that_is_no_value_is_an_error(type_, text):
    with pytest.raises(ValueError):
        typed(type_).parse(text)


def test_literals_and_enums_are_choices_that_give_members_back():
    made = typed(Literal["yes", "no", 3, True, None])
    assert made.kind == "choice"
    assert json.loads(made.spec) == ["yes", "no", "3", "True", "None"]
    assert [made.parse(t) for t in json.loads(made.spec)] == ["yes", "no", 3, True, None]
    assert typed(Colour).parse("green") is Colour.GREEN
    assert json.loads(typed(Level).spec) == ["1", "2"] and typed(Level).parse("2") is Level.HIGH
    assert json.loads(typed(Opaque).spec) == ["A", "B"] and typed(Opaque).parse("B") is Opaque.B
    assert typed(Literal[Colour.RED]).parse("red") is Colour.RED


def test_choices_written_alike_and_empty_enums_are_refused():
    with pytest.raises(BadInputError, match="alike"):
        typed(Literal["1", 1])
    with pytest.raises(BadInputError, match="no members"):
        typed(enum.Enum("Nothing", []))


@pytest.mark.parametrize(
    ("type_", "text", "value"),
    [
        (Point, '{"x":1}', Point(1)),
        (Point, '{"x":1,"y":2,"tags":["a"]}', Point(1, 2.0, ["a"])),
        (
            Tree,
            '{"value":1,"children":[{"value":2,"children":[],"colour":"red"}]}',
            Tree(1, [Tree(2, [], Colour.RED)]),
        ),
        (Movie, '{"title":"M"}', {"title": "M"}),
        (Movie, '{"title":"M","year":1931}', {"title": "M", "year": 1931}),
        (
            Person,
            '{"name":"A","age":3,"friend":{"name":"B","age":4}}',
            Person(name="A", age=3, friend=Person(name="B", age=4)),
        ),
        (
            Party,
            '{"host":{"name":"A","age":3},"guests":[],"at":{"x":0}}',
            Party(Person(name="A", age=3), [], Point(0)),
        ),
        (list[int], "[1,2]", [1, 2]),
        (tuple[int, str], '[1,"a"]', (1, "a")),
        (tuple[int, ...], "[1,2,3]", (1, 2, 3)),
        (dict[str, float], '{"a":1}', {"a": 1.0}),
        (set[Literal["a", "b"]], '["a"]', {"a"}),
        (int | str | None, "null", None),
        (int | str | None, '"x"', "x"),
        (float | int, "1", 1),
        (Annotated[list[Id], "ids"], "[4]", [4]),
        (list[Level], "[2]", [Level.HIGH]),
        (dict[str, Any], '{"a":[1,{"b":null}]}', {"a": [1, {"b": None}]}),
    ],
)
def test_types_have_schemas_that_take_what_they_parse(type_, text, value):
    schema = json_schema_of(type_)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads(text), schema)
    made = typed(type_)
    assert made.kind == "json_schema" and json.loads(made.spec) == schema
    result = made.parse(text)
    assert result == value and type(result) is type(value)


@pytest.mark.parametrize(
    ("type_", "text"),
    [
        (Point, '{"x":"1"}'),
        (Point, '{"y":1}'),
        (Point, '{"x":1,"z":2}'),
        (Movie, '{"title":1}'),
        (Person, '{"name":"A","age":-1}'),
        (Person, '{"name":"A","age":1,"other":1}'),
        (Tree, '{"value":1,"children":[{"value":2}]}'),
        (list[int], "[true]"),
        (tuple[int, str], "[1]"),
        (Colour, '"blue"'),
        (int | None, '"x"'),
    ],
)
def test_what_is_outside_a_type_is_outside_its_schema(type_, text):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(text), json_schema_of(type_))
    if type_ is not Person or "other" not in text:  # pydantic ignores more fields when it parses
        with pytest.raises(ValueError):
            value_from_json(type_, text)


def test_text_cut_in_the_middle_is_a_value_error():
    for type_ in (Point, Person, Movie):
        with pytest.raises(ValueError):
            typed(type_).parse('{"x": 1, "na')


@pytest.mark.parametrize(
    ("type_", "words"),
    [
        (complex, "complex"),
        (dict[int, str], "keys"),
        (list[complex], "complex"),
        (dataclasses.make_dataclass("D", [("f", bytes)]), "D.f"),
        (lambda: None, "no JSON schema"),
        (3, "no JSON schema"),
        ([int], "no JSON schema"),
    ],
)
def test_types_without_a_schema_are_named(type_, words):
    with pytest.raises(BadInputError, match=re.escape(words)):
        typed(type_)


def test_schemas_come_as_text_dict_or_type():
    assert typed_json({"type": "integer"}).parse("3") == 3
    assert typed_json('{"type":"integer"}').spec == '{"type":"integer"}'
    assert isinstance(typed_json(Person).parse('{"name":"A","age":1}'), Person)
    with pytest.raises(BadInputError, match="not JSON"):
        typed_json("{type: integer}")
    with pytest.raises(BadInputError, match="not JSON"):
        typed_json({"const": float("nan")})


def test_models_that_allow_more_stay_open_and_others_are_closed():
    class Open(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="allow")
        a: int

    class Maps(pydantic.BaseModel):
        counts: dict[str, int] = {}

    assert json_schema_of(Open)["additionalProperties"] is True
    assert json_schema_of(Maps)["additionalProperties"] is False
    counts = json_schema_of(Maps)["properties"]["counts"]
    assert counts["additionalProperties"] == {"type": "integer"}


def test_sets_of_models_may_be_written_with_doubles():
    class Bag(pydantic.BaseModel):
        items: set[int]

    class Keywords(pydantic.BaseModel):  # fields may be called as keywords are
        uniqueItems: Bag  # noqa: N815
        default: Bag

    schema = json_schema_of(Keywords)
    assert set(schema["properties"]) == {"uniqueItems", "default"}
    made = typed_json(Bag)
    assert "uniqueItems" not in made.spec
    assert made.parse('{"items":[1,1,2]}') == Bag(items={1, 2})


def test_nothing_heavy_is_imported():
    code = (
        "import sys, ramet.runtime.program.typed; "
        "print([m for m in ('torch', 'pydantic', 'numpy', 'tokenizers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, check=True)
    assert out.stdout.decode().strip() == "[]"
