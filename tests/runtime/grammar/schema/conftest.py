"""Random schemas with instances, and a vocabulary of bytes with a few longer tokens."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from ramet.runtime.grammar.llguidance_backend import LLGuidanceBackend
from ramet.runtime.grammar.matcher import Grammar
from ramet.runtime.grammar.spec import Spec
from ramet.runtime.grammar.vocabulary import Vocabulary

NAMES = ["a", "b", "c", "key", "é", 'x"y', "line\n"]
PIECES = [b'{"', b'":', b'","', b'"}', b"true", b"null", b'"a', b"1,", b"[]", "é".encode(), b"}]"]
PATTERNS = ["^[a-c]+$", "b", "^a", "c$", "^(ab|c)*$", "[0-9]{2}", "^.$", "^[^a]+$", "é|x"]
VALUES = ["a", "b", "ab", "é\n", 1, 2, 1.5, -3, True, False, None, [1], {"a": 1}]
TEXTS = ["abc", "b", "a", "ca", "ab", "12", "é", "xx", "abab", "cc", "ac"]
OTHERS = [None, True, 1, -2.5, "a", "é", [], {}, [1, "b"], {"a": 1}, {"b": None, "q": 2}]


class RandomSchema:
    """One schema and as many instances as are asked for, most of them meant to be valid."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.defs: dict[str, Any] = {}
        if self._may(0.4):
            self.defs = {"d": {}, "e": {}}
            self.defs = {name: self._schema(1) for name in self.defs}
        self.schema = self._schema(3)
        if isinstance(self.schema, dict) and self.defs:
            self.schema["$defs"] = self.defs

    def _may(self, share: float) -> bool:
        return self.random.random() < share

    def _schema(self, depth: int) -> Any:
        pick = self.random.random()
        if depth and pick < 0.24:
            return self._combined(depth - 1)
        if pick < 0.26:
            return self.random.choice([True, {}, {}, False])
        if pick < 0.30 and self.defs:
            return {"$ref": f"#/$defs/{self.random.choice(list(self.defs))}"}
        kinds = ["string", "integer", "number", "boolean", "null", "array", "object", "object"]
        kind = self.random.choice([*kinds, "values", "several"])
        if kind == "values":
            values = self.random.sample(VALUES, self.random.randint(1, 4))
            return {"enum": values} if self._may(0.7) else {"const": values[0]}
        if kind == "several":
            return {"type": self.random.sample(["string", "integer", "null", "boolean"], 2)}
        schema: dict[str, Any] = {} if self._may(0.12) else {"type": kind}
        add = getattr(self, f"_{kind}", None)
        if add is not None:
            add(schema, depth)
        return schema

    def _combined(self, depth: int) -> Any:
        form = self.random.choice(["anyOf", "anyOf", "oneOf", "oneOf", "allOf", "not", "if"])
        if form == "if":
            return {key: self._schema(depth) for key in ("if", "then", "else")}
        if form == "not":
            schema = self._schema(depth)
            return {**(schema if isinstance(schema, dict) else {}), "not": self._schema(depth)}
        return {form: [self._schema(depth) for _ in range(self.random.randint(1, 3))]}

    def _string(self, schema: dict[str, Any], depth: int) -> None:
        if self._may(0.3):
            schema["minLength"] = self.random.randint(0, 3)
        if self._may(0.3):
            schema["maxLength"] = self.random.randint(1, 5)
        if self._may(0.25):
            schema["pattern"] = self.random.choice(PATTERNS)

    def _integer(self, schema: dict[str, Any], depth: int) -> None:
        for name, values in (
            ("minimum", [-5, 0, 1]),
            ("maximum", [3, 10, 99]),
            ("exclusiveMinimum", [-1, 0]),
            ("exclusiveMaximum", [5, 20]),
            ("multipleOf", [2, 3, 5]),
        ):
            if self._may(0.2):
                schema[name] = self.random.choice(values)

    def _number(self, schema: dict[str, Any], depth: int) -> None:
        self._integer(schema, depth)
        if "minimum" in schema:
            schema["minimum"] += 0.5
        if "multipleOf" in schema:
            schema["multipleOf"] = self.random.choice([2, 0.5])

    def _array(self, schema: dict[str, Any], depth: int) -> None:
        if depth and self._may(0.8):
            schema["items"] = self._schema(depth - 1)
        if depth and self._may(0.25):
            schema["prefixItems"] = [self._schema(depth - 1)] * self.random.randint(1, 2)
        if self._may(0.3):
            schema["minItems"] = self.random.randint(0, 2)
        if self._may(0.4):
            schema["maxItems"] = self.random.randint(0, 3)
        if self._may(0.1):
            schema["uniqueItems"] = self._may(0.5)

    def _object(self, schema: dict[str, Any], depth: int) -> None:
        if depth:
            names = self.random.sample(NAMES, self.random.randint(0, 3))
            schema["properties"] = {name: self._schema(depth - 1) for name in names}
            schema["required"] = [name for name in names if self._may(0.5)]
            if self._may(0.08):
                schema["required"].append("zz")
            if names and self._may(0.05):
                schema["dependentRequired"] = {names[0]: [self.random.choice(NAMES)]}
            if self._may(0.08):
                pattern = self.random.choice(["^k", "b$"])
                schema["patternProperties"] = {pattern: self._schema(depth - 1)}
            if self._may(0.06):
                schema["propertyNames"] = {"pattern": self.random.choice(["^[a-c]", "y"])}
        if self._may(0.5):
            schema["additionalProperties"] = False
        elif depth and self._may(0.3):
            schema["additionalProperties"] = self._schema(depth - 1)
        for name in ("minProperties", "maxProperties"):
            if self._may(0.08):
                schema[name] = self.random.randint(0, 2)

    def instance(self) -> Any:
        return self._instance(self.schema, 6)

    def _instance(self, schema: Any, depth: int) -> Any:
        if depth <= 0:
            return None
        if not isinstance(schema, dict) or self._may(0.06):
            return self.random.choice(OTHERS)
        if "$ref" in schema:
            return self._instance(self.defs[schema["$ref"].split("/")[-1]], depth - 1)
        for form in ("anyOf", "oneOf"):
            if form in schema:
                return self._instance(self.random.choice(schema[form]), depth - 1)
        if "allOf" in schema:
            found = [self._instance(part, depth - 1) for part in schema["allOf"]]
            if all(isinstance(value, dict) for value in found):
                return {name: value for part in found for name, value in part.items()}
            return self.random.choice(found)
        if "if" in schema:
            return self._instance(schema[self.random.choice(["then", "else", "if"])], depth - 1)
        if "enum" in schema or "const" in schema:
            return self.random.choice(schema.get("enum") or [schema["const"]])
        return self._of_kind(schema, depth)

    def _of_kind(self, schema: dict[str, Any], depth: int) -> Any:
        kind = schema.get("type", "object" if "properties" in schema else "integer")
        kind = self.random.choice(kind) if isinstance(kind, list) else kind
        match kind:
            case "string":
                if "pattern" in schema:
                    return self.random.choice(TEXTS)
                count = self.random.randint(schema.get("minLength", 0), 5)
                return "".join(self.random.choice('abcé"\\\n😀 ') for _ in range(count))
            case "integer":
                return self.random.randint(-20, 30)
            case "number":
                return self.random.choice([0.5, 1.5, 2, -3, 7.25, 1e-3, 2.5, 10, 99, 0])
            case "boolean":
                return self._may(0.5)
            case "null":
                return None
            case "array":
                first = schema.get("prefixItems", [])
                items = [*first, *[schema.get("items", True)] * 3]
                count = self.random.randint(schema.get("minItems", 0), 3)
                return [self._instance(item, depth - 1) for item in items[:count]]
        return self._members(schema, depth - 1)

    def _members(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        rest = schema.get("additionalProperties", True)
        required = schema.get("required", [])
        members = {
            name: self._instance(item, depth)
            for name, item in schema.get("properties", {}).items()
            if name in required or self._may(0.6)
        }
        for name in required:
            members.setdefault(name, self._instance(rest, depth))
        if self._may(0.25):
            members[self.random.choice(["kk", "q", "bb", "zz"])] = self._instance(rest, depth)
        return members


class Tools:
    """What schema tests do with grammars over `vocabulary`."""

    MOST = 40

    def __init__(self) -> None:
        tokens = [*(bytes((i,)) for i in range(256)), *PIECES, b""]
        self.vocabulary = Vocabulary(tokens, eos_ids=[len(tokens) - 1])
        self.backend = LLGuidanceBackend()

    def compile(self, schema: Any, whitespace: Any = "compact") -> Grammar:
        return self.backend.compile(Spec.of("json_schema", schema, whitespace), self.vocabulary)

    def takes(self, grammar: Grammar, text: str) -> bool:
        """Whether a text, byte by byte, is whole."""
        matcher = grammar.matcher()
        return all(matcher.accept(byte) for byte in text.encode()) and matcher.can_end()

    def texts(self, value: Any) -> list[str]:
        """Compact texts of a value, members in every order; `MOST` at most."""
        return list(itertools.islice(self._texts(value), self.MOST))

    def _texts(self, value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            for order in itertools.permutations(value.items()):
                parts = [
                    [f"{json.dumps(name, ensure_ascii=False)}:{text}" for text in self.texts(item)]
                    for name, item in order
                ]
                for members in itertools.product(*parts):
                    yield "{" + ",".join(members) + "}"
        elif isinstance(value, list):
            for items in itertools.product(*map(self.texts, value)):
                yield "[" + ",".join(items) + "]"
        else:
            yield json.dumps(value, ensure_ascii=False)

    def generate(self, grammar: Grammar, draw: random.Random, most: int = 250) -> str | None:
        """A random walk through the masks until it ends, with a bent for closing; None: too long"""
        matcher = grammar.matcher()
        row = np.zeros(self.vocabulary.words, np.int32)
        end = self.vocabulary.eos_ids[0]
        out = b""
        for step in range(most):
            if matcher.is_done():
                return out.decode()
            matcher.fill(row)
            bits = np.unpackbits(row.view(np.uint8), bitorder="little")
            ids = np.flatnonzero(bits).tolist()
            assert (end in ids) == matcher.can_end()
            if end in ids and (len(ids) == 1 or draw.random() < 0.3 or step > 100):
                assert matcher.accept(end)
                assert matcher.is_done()
                return out.decode()
            ids = [i for i in ids if i != end]
            closing = [i for i in ids if self.vocabulary.tokens[i][:1] in b'"}]:,']
            token = draw.choice(closing if closing and draw.random() < 0.5 + step / 120 else ids)
            assert matcher.accept(token), "a mask allowed what is not accepted"
            out += self.vocabulary.tokens[token]
        return None


@pytest.fixture(scope="session")
def schemas() -> Tools:
    return Tools()


@pytest.fixture(scope="session")
def random_schema() -> Callable[[int], RandomSchema]:
    return RandomSchema
