"""Dates, ids, decimals and bounds beside types: schemas that take what becomes a value, and no
more."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import json
import uuid
from typing import Annotated, Any, Literal

import jsonschema
import pydantic
import pytest
from ramet.runtime.program.typed import typed, typed_json

D = decimal.Decimal
ID = "123e4567-e89b-12d3-a456-426614174000"


@dataclasses.dataclass
class Visit:
    day: datetime.date
    cost: decimal.Decimal
    room: Annotated[int, pydantic.Field(ge=1, lt=5)] = 1


class Side(enum.Enum):
    LEFT = "left"
    RIGHT = "right"


class Price(pydantic.BaseModel):
    plain: decimal.Decimal = D(0)
    exact: decimal.Decimal = pydantic.Field(D(0), max_digits=4, decimal_places=1, gt=-5)
    whole: decimal.Decimal = pydantic.Field(D(0), decimal_places=0)


class Maps(pydantic.BaseModel):
    by_number: dict[int, int] = {}
    by_side: dict[Side, int] = {}
    by_id: dict[uuid.UUID, int] = {}
    home: pydantic.HttpUrl | None = None


def takes(spec: str, text: str) -> bool:
    checker = jsonschema.FormatChecker(("date", "uuid"))
    return jsonschema.Draft202012Validator(json.loads(spec), format_checker=checker).is_valid(
        json.loads(text)
    )


@pytest.mark.parametrize(
    ("type_", "text", "value"),
    [
        (datetime.date, '"2024-02-29"', datetime.date(2024, 2, 29)),
        (datetime.time, '"10:30:00z"', datetime.time(10, 30, tzinfo=datetime.UTC)),
        (
            datetime.datetime,
            '"2024-02-29t10:30:00.5Z"',
            datetime.datetime(2024, 2, 29, 10, 30, 0, 500_000, datetime.UTC),
        ),
        (uuid.UUID, f'"{ID}"', uuid.UUID(ID)),
        (D, "1.10", D("1.1")),
        (D, "7", D(7)),
        (list[D | None], "[0.1,null]", [D("0.1"), None]),
        (Visit, '{"day":"2024-01-02","cost":2.5}', Visit(datetime.date(2024, 1, 2), D("2.5"))),
        (Literal["a", 1, True], "true", True),
        (Literal["a", 1, True], "1", 1),
        (Annotated[int, pydantic.Field(ge=0)], "3", 3),
    ],
)
def test_values_come_back(type_: Any, text: str, value: Any) -> None:
    found = typed_json(type_)
    assert takes(found.spec, text)
    parsed = found.parse(text)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("type_", "text"),
    [
        (datetime.date, "3"),
        (datetime.date, '"2024-02-30"'),
        (uuid.UUID, '"12"'),
        (D, '"1"'),
        (D, "true"),
        (Visit, '{"day":"2024-01-02","cost":true}'),
    ],
)
def test_what_is_none_is_an_error_that_says_where(type_: Any, text: str) -> None:
    found = typed_json(type_)
    assert not takes(found.spec, text)
    with pytest.raises(ValueError, match=type_.__name__):
        found.parse(text)


@pytest.mark.parametrize(
    ("type_", "good", "bad"),
    [
        (Annotated[int, pydantic.Field(gt=1, le=3)], "2 3", "1 4"),
        (Annotated[float, pydantic.Field(multiple_of=0.5)], "1.5 2", "1.2"),
        (Annotated[str, pydantic.Field(min_length=2, max_length=3)], '"ab" "abc"', '"a" "abcd"'),
        (Annotated[str, pydantic.StringConstraints(pattern="^[a-c]+$")], '"abc"', '"d"'),
        (Annotated[list[int], pydantic.Field(min_length=1)], "[1]", "[]"),
        (Annotated[dict[str, int], pydantic.Field(max_length=1)], '{"a":1}', '{"a":1,"b":2}'),
        (Annotated[str | list[int], pydantic.Field(max_length=1)], '"a" [1]', '"ab" [1,2]'),
        (Annotated[int, "a word"], "1", '"a"'),
        (Visit, '{"day":"2024-01-02","cost":1,"room":4}', '{"day":"2024-01-02","cost":1,"room":5}'),
        (Price, '{"plain":1.25} {"exact":99.5} {"exact":-4.9} {"whole":7}',
         '{"plain":"x"} {"exact":1.25} {"exact":1000} {"exact":-5} {"whole":0.5}'),
        (Maps, '{"by_number":{"-1":2}} {"by_side":{"left":1}} {"home":"https://a.b"}',
         '{"by_number":{"x":2}} {"by_number":{"01":2}} {"by_side":{"up":1}} {"home":"ftp://a"}'),
    ],
)  # fmt: skip
def test_bounds_of_types_are_bounds_of_schemas(type_: Any, good: str, bad: str) -> None:
    found = typed_json(type_)
    for text in good.split():
        assert takes(found.spec, text), text
        found.parse(text)
    for text in bad.split():
        assert not takes(found.spec, text), text


def test_a_dtype_with_bounds_is_json_and_one_without_is_as_ever() -> None:
    assert typed(Annotated[int, pydantic.Field(ge=0)]).kind == "json_schema"
    assert typed(Annotated[int, "a word"]).kind == "regex"
