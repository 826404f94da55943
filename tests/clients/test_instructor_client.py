"""instructor, unmodified, in an environment of its own."""

from __future__ import annotations

import pytest

SCRIPT = """
import json, sys
import instructor
from openai import OpenAI
from pydantic import BaseModel

class Person(BaseModel):
    name: str
    age: int

url, mode, said = sys.argv[1:]
client = instructor.from_openai(
    OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60),
    mode=getattr(instructor.Mode, mode),
)
person = client.chat.completions.create(
    model="echo",
    response_model=Person,
    messages=[{"role": "user", "content": f"[[{said}]]"}],
    max_retries=0,
)
print(json.dumps(person.model_dump()))
"""
ANN = '{"name": "Ann", "age": 33}'


@pytest.mark.parametrize(("mode", "said"), [("MD_JSON", f"```json\n{ANN}\n```"), ("JSON", ANN)])
def test_a_model_of_pydantic(echo, elsewhere, mode, said):
    assert elsewhere(SCRIPT, echo, mode, said) == {"name": "Ann", "age": 33}
