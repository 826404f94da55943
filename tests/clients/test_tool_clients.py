"""Tools and forms of answers, as langchain, litellm, instructor and the openai SDK ask for them."""

from __future__ import annotations

import json
from typing import Any, Literal

import litellm
import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field, SecretStr

pytestmark = pytest.mark.filterwarnings("ignore")  # the clients' own

CALL = {"name": "weather", "arguments": {"city": "Paris", "days": 2}}
SAYS_CALL = f"[[Let me look.\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>]]"
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 5},
            },
            "required": ["city", "days"],
        },
    },
}


@tool
def weather(city: Literal["Paris", "Rome"], days: int) -> str:
    """The weather of a city."""
    return f"{days} days of sun in {city}"


class Verdict(BaseModel):
    """What is thought of it."""

    colour: Literal["red", "green", "blue"]
    stars: int = Field(ge=1, le=5)


QUESTION = "Which colour is the sky, and how many stars does it get?"


# --- what a model that repeats says: the calls are found in its text ------------------------------


@pytest.fixture
def chat(echo: str) -> ChatOpenAI:
    return ChatOpenAI(
        model="echo", base_url=f"{echo}/v1", api_key=SecretStr("none"), max_retries=0, timeout=20
    )


def test_langchain_calls_a_tool_and_brings_its_result(chat):
    model = chat.bind_tools([weather])
    question = HumanMessage(SAYS_CALL)
    answer = model.invoke([question])
    assert answer.content.strip() == "Let me look."
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("weather", CALL["arguments"])
    assert answer.response_metadata["finish_reason"] == "tool_calls"
    result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    last = model.invoke([question, answer, result, HumanMessage("Say [[It is sunny.]]")])
    assert (last.content, last.tool_calls) == ("It is sunny.", [])


def test_langchain_calls_a_tool_in_pieces(chat):
    whole: Any = None
    for piece in chat.bind_tools([weather]).stream([HumanMessage(SAYS_CALL)]):
        whole = piece if whole is None else whole + piece
    assert whole.content.strip() == "Let me look."
    (call,) = whole.tool_calls
    assert (call["name"], call["args"]) == ("weather", CALL["arguments"])


@pytest.mark.parametrize("stream", [False, True])
def test_litellm_calls_a_tool(echo, stream):
    messages = [{"role": "user", "content": SAYS_CALL}]
    done = litellm.completion(
        model="hosted_vllm/echo", api_base=f"{echo}/v1", api_key="none", messages=messages,
        tools=[TOOL], tool_choice="auto", stream=stream, timeout=20, num_retries=0,
    )  # fmt: skip
    if stream:
        done = litellm.stream_chunk_builder(list(done), messages=messages)
    choice = done.choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == CALL["arguments"]


# --- what the real model is made to say ----------------------------------------------------------


@pytest.fixture(scope="module")
def real(served: Any) -> dict[str, Any]:
    return {"model": "any/name:v1", "base_url": f"{served.url}/v1"}


@pytest.mark.model
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_gets_a_model_of_pydantic(real, method):
    chat = ChatOpenAI(**real, api_key=SecretStr("none"), max_retries=0, timeout=60, temperature=0)
    verdict = chat.with_structured_output(Verdict, method=method).invoke(QUESTION)
    assert isinstance(verdict, Verdict)


@pytest.mark.model
@pytest.mark.parametrize("choice", ["required", "weather"])
def test_langchain_makes_it_call_a_tool(real, choice):
    chat = ChatOpenAI(**real, api_key=SecretStr("none"), max_retries=0, timeout=60, temperature=0)
    answer = chat.bind_tools([TOOL], tool_choice=choice).invoke("How will it be in Rome?")
    assert isinstance(answer, AIMessage)
    (call,) = answer.tool_calls
    assert call["name"] == "weather"
    assert call["args"]["city"] in ("Paris", "Rome")
    assert 1 <= call["args"]["days"] <= 5


@pytest.mark.model
def test_litellm_gets_a_form_and_a_call(real):
    asked = {
        "model": f"hosted_vllm/{real['model']}", "api_base": real["base_url"], "api_key": "none",
        "messages": [{"role": "user", "content": QUESTION}], "timeout": 60, "num_retries": 0,
        "temperature": 0,
    }  # fmt: skip
    done = litellm.completion(**asked, response_format=Verdict)
    Verdict.model_validate_json(done.choices[0].message.content)
    named = {"type": "function", "function": {"name": "weather"}}
    done = litellm.completion(**asked, tools=[TOOL], tool_choice=named)
    (call,) = done.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


@pytest.mark.model
async def test_the_openai_sdk_parses(real):
    async with openai.AsyncOpenAI(
        base_url=real["base_url"], api_key="none", max_retries=0, timeout=60
    ) as client:
        done = await client.chat.completions.parse(
            model=real["model"],
            messages=[{"role": "user", "content": QUESTION}],
            response_format=Verdict,
            temperature=0,
        )
        assert isinstance(done.choices[0].message.parsed, Verdict)
        async with client.chat.completions.stream(
            model=real["model"],
            messages=[{"role": "user", "content": QUESTION}],
            response_format=Verdict,
            temperature=0,
        ) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.parsed == done.choices[0].message.parsed


INSTRUCTOR = """
import json, sys
from typing import Literal
import instructor
from openai import OpenAI
from pydantic import BaseModel, Field

class Verdict(BaseModel):
    colour: Literal["red", "green", "blue"]
    stars: int = Field(ge=1, le=5)

url, model, question = sys.argv[1:]
found = {}
for mode in ("TOOLS", "JSON_SCHEMA"):
    client = instructor.from_openai(
        OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120),
        mode=getattr(instructor.Mode, mode),
    )
    verdict = client.chat.completions.create(
        model=model,
        response_model=Verdict,
        messages=[{"role": "user", "content": question}],
        max_retries=0,
        temperature=0,
    )
    found[mode] = verdict.model_dump()
print(json.dumps(found))
"""


@pytest.mark.model
def test_instructor_gets_models_of_pydantic(real, elsewhere):
    found = elsewhere(INSTRUCTOR, real["base_url"], real["model"], QUESTION)
    assert found.keys() == {"TOOLS", "JSON_SCHEMA"}
    for verdict in found.values():
        Verdict.model_validate(verdict)
