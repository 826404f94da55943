"""Schemas of pydantic's models, narrowed to what the models take: some of their own say less."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

_INTEGER_KEY = "^(?:0|-?[1-9][0-9]{0,18})$"


def model_schema(model: Any) -> dict[str, Any]:
    """What ``model_json_schema`` of a model, or of what looks like one, says: but decimals are
    numbers with no more decimals and digits than they may have, URLs have the schemes that are
    allowed, and keys that are integers are written as such."""
    if not hasattr(model, "__pydantic_core_schema__"):
        return model.model_json_schema()
    return model.model_json_schema(schema_generator=_generator())


@cache
def _generator() -> Any:
    """Made here, as only who has a model has pydantic."""
    from pydantic.json_schema import GenerateJsonSchema

    class Narrow(GenerateJsonSchema):
        def decimal_schema(self, schema: Any) -> dict[str, Any]:
            found = super().decimal_schema(schema)
            numbers = [one for one in found.get("anyOf", ()) if one.get("type") == "number"]
            return {**numbers[0], **_digits(schema)} if numbers else found

        def dict_schema(self, schema: Any) -> dict[str, Any]:
            found = super().dict_schema(schema)
            if schema.get("keys_schema", {}).get("type") == "int":
                found.setdefault("propertyNames", {"pattern": _INTEGER_KEY})
            return found

        def url_schema(self, schema: Any) -> dict[str, Any]:
            found = super().url_schema(schema)
            schemes = schema.get("allowed_schemes")
            return {**found, "pattern": f"^(?:{'|'.join(schemes)})://"} if schemes else found

    return Narrow


def _digits(schema: Mapping[str, Any]) -> dict[str, Any]:
    """How many digits a decimal may have, in words of JSON Schema."""
    places, digits = schema.get("decimal_places"), schema.get("max_digits")
    parts: list[dict[str, Any]] = []
    if places is not None:
        parts.append({"multipleOf": 1 if places == 0 else float(f"1e-{places}")})
    if digits is not None:
        end = 10 ** max(digits - (places or 0), 0)
        parts.append({"exclusiveMinimum": -end, "exclusiveMaximum": end})
    return {"allOf": parts} if parts else {}
