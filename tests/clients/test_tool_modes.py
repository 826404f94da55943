"""Tools and forms of answers as langchain, litellm and instructor ask for them."""

from __future__ import annotations

import json
from typing import Any

import litellm
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int


ANN = {"name": "Ann", "age": 33}
CALL = json.dumps({"name": "Person", "arguments": ANN})
TAGGED = f"<tool_call>\n{CALL}\n</tool_call>"


@pytest.fixture
def chat(echo: str) -> ChatOpenAI:
    return ChatOpenAI(
        model="echo", base_url=f"{echo}/v1", api_key=SecretStr("none"), max_retries=0, timeout=20
    )


class TestLangchain:
    def test_tools_that_may_be_called(self, chat):
        bound = chat.bind_tools([Person])
        asked = HumanMessage(f"Say [[I look. {TAGGED}{TAGGED}]]")
        answer = bound.invoke([asked])
        assert answer.content == "I look."
        assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("Person", ANN)] * 2
        assert answer.response_metadata["finish_reason"] == "tool_calls"
        pieces = list(bound.stream([asked]))
        whole = pieces[0]
        for piece in pieces[1:]:
            whole += piece
        assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("Person", ANN)] * 2

    def test_tools_that_must_be_called(self, chat):
        for choice in ("required", "Person", {"type": "function", "function": {"name": "Person"}}):
            bound = chat.bind_tools([Person], tool_choice=choice)
            (call,) = bound.invoke([HumanMessage(f"[[{CALL}]]")]).tool_calls
            assert call["args"] == ANN

    def test_results_go_back(self, chat):
        bound = chat.bind_tools([Person])
        first = bound.invoke([HumanMessage(f"[[{TAGGED}]]")])
        (call,) = first.tool_calls
        history = [
            HumanMessage("Who?"),
            AIMessage("", tool_calls=first.tool_calls),
            ToolMessage("[[It is Ann.]]", tool_call_id=call["id"]),
        ]
        assert bound.invoke(history).content == "It is Ann."

    @pytest.mark.parametrize(
        ("method", "said"),
        [("json_schema", json.dumps(ANN)), ("function_calling", CALL),
         ("json_mode", json.dumps(ANN))],
    )  # fmt: skip
    def test_models_of_pydantic(self, chat, method, said):
        parsed = chat.with_structured_output(Person, method=method)
        assert parsed.invoke([HumanMessage(f"In JSON: [[{said}]]")]) == Person(**ANN)


class TestLitellm:
    @pytest.fixture
    def asked(self, echo: str) -> dict[str, Any]:
        tool = {"name": "Person", "parameters": Person.model_json_schema()}
        return {
            "model": "hosted_vllm/echo", "api_base": f"{echo}/v1", "api_key": "none", "timeout": 20,
            "num_retries": 0, "tools": [{"type": "function", "function": tool}],
        }  # fmt: skip

    def test_tools(self, asked):
        for choice, said in (("auto", TAGGED), ("required", CALL)):
            messages = [{"role": "user", "content": f"[[{said}]]"}]
            done = litellm.completion(**asked, messages=messages, tool_choice=choice)
            (call,) = done.choices[0].message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("Person", ANN)
            assert done.choices[0].finish_reason == "tool_calls"
            chunks = list(
                litellm.completion(**asked, messages=messages, tool_choice=choice, stream=True)
            )
            whole = litellm.stream_chunk_builder(chunks, messages=messages)
            (again,) = whole.choices[0].message.tool_calls
            assert again.function.arguments == call.function.arguments

    def test_a_model_of_pydantic(self, asked):
        del asked["tools"]
        messages = [{"role": "user", "content": f"[[{json.dumps(ANN)}]]"}]
        done = litellm.completion(**asked, messages=messages, response_format=Person)
        assert Person.model_validate_json(done.choices[0].message.content) == Person(**ANN)


INSTRUCTOR = """
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


@pytest.mark.parametrize(
    ("mode", "said"),
    [("TOOLS", CALL), ("JSON", json.dumps(ANN)), ("JSON_SCHEMA", json.dumps(ANN))],
)
def test_instructor(echo, elsewhere, mode, said):
    assert elsewhere(INSTRUCTOR, echo, mode, said) == ANN
