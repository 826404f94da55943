"""Chat templates rendered whole, and the markers found by rendering them round sentinels."""

from __future__ import annotations

import re
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ramet.runtime.gateway.template import ChatTemplate, Opening
from ramet.runtime.protocol.errors import BadInputError, ProgramError

CHATML = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}
{{- '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA3 = """{{ bos_token }}{% for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}{% if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""  # noqa: E501

GEMMA = """{{ bos_token }}{% if messages[0].role == 'system' %}
{%- set lead = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}
{%- else %}{% set lead = '' %}{% set rest = messages %}{% endif %}
{%- for message in rest %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Roles must alternate user/assistant') }}{% endif %}
{%- set role = 'model' if message.role == 'assistant' else message.role %}
{{- '<start_of_turn>' + role + '\n' + (lead if loop.first else '') }}
{{- message.content | trim }}{{ '<end_of_turn>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

MISTRAL = """{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}
{%- set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}
{{- bos_token }}{% for message in rest %}
{%- if message.role == 'user' %}{{ '[INST] ' }}
{%- if loop.first and system is defined %}{{ system + '\n\n' }}{% endif %}
{{- message.content + '[/INST]' }}
{%- elif message.role == 'assistant' %}{{ ' ' + message.content + eos_token }}
{%- else %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}
{%- endfor %}"""

MISTRAL_LAST = MISTRAL.replace("loop.first and", "loop.last and")

QWEN3 = """{% for message in messages %}{% set content = message.content %}
{%- if message.role == 'assistant' %}{% set content = content.split('</think>')[-1] %}
{{- '<|im_start|>assistant\n' }}{% if loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{{- content + '<|im_end|>\n' }}
{%- else %}{{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

REWRITING = """{% for message in messages %}{{ '[' + message.role }}
{%- if loop.last %}{{ ' last' }}{% endif %}{{ ']' + message.content + '\n' }}{% endfor %}"""

HOISTING = """{% for m in messages if m.role == 'system' %}{{ 'S:' + m.content + '\n' }}{% endfor %}
{%- for m in messages if m.role != 'system' %}{{ m.role + ':' + m.content + '\n' }}{% endfor %}"""

NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
APPENDING = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "mistral": MISTRAL, "qwen3": QWEN3}


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, NAMED)


def messages_of(*pairs: str) -> list[dict[str, str]]:
    return [dict(zip(("role", "content"), pair.split(":", 1))) for pair in pairs]


# --- whole renderings ---


def test_what_transformers_renders() -> None:
    """The sandbox is set up as theirs is: blanks, loop controls, tojson, dates, refusals."""
    from transformers.utils.chat_template_utils import render_jinja_template

    odd = (
        "{% for m in messages %}\n  {% if m.role == 'skip' %}{% continue %}{% endif %}\n"
        "{{ m.content | tojson }} {{ {'a': [1, 'é<>']} | tojson(indent=2) }}\n"
        "  {% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}"
        "{{ strftime_now('%Y') }}"
    )
    messages = messages_of("user:a 'quoted' <b>", "skip:x", "assistant:ü")
    ours = ChatTemplate(odd).render(messages)
    theirs, _ = render_jinja_template([messages], chat_template=odd, add_generation_prompt=True)
    assert ours == theirs[0]
    assert str(datetime.now().year) in ours


def test_variables_and_generation_prompt() -> None:
    t = template("{{ x }}{% if add_generation_prompt %}!{% endif %}{{ bos_token }}")
    assert t.render([], x=1) == "1!<s>"
    assert t.render([], False, x=2) == "2<s>"


def test_refusals_come_in_the_templates_words() -> None:
    with pytest.raises(BadInputError, match="Roles must alternate user/assistant"):
        template(GEMMA).render(messages_of("user:a", "user:b"))


def test_no_template_and_a_broken_one() -> None:
    with pytest.raises(ProgramError, match="no chat template"):
        ChatTemplate(None)
    with pytest.raises(ProgramError, match=r"not valid: .*line 2"):
        ChatTemplate("\n{% if %}")
    with pytest.raises(BadInputError, match="chat template failed"):
        ChatTemplate("{{ messages[0].content + 1 }}").render(messages_of("user:a"))
    with pytest.raises(BadInputError, match="chat template failed"):
        ChatTemplate("{{ nothing.at.all }}").render([])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ strftime_now.__globals__['sys'] }}",
    ],
)
def test_a_template_cannot_reach_out(source: str) -> None:
    with pytest.raises(BadInputError):
        ChatTemplate(source).render(messages_of("user:a"))


# --- markers ---


def play(t: ChatTemplate, *pairs: str) -> str:
    """The text of a conversation by its markers, every message closed."""
    session = t.session()
    text = ""
    for message in messages_of(*pairs):
        opening = session.open(message["role"])
        assert opening.rewrites is None
        text += opening.prefix + message["content"] + session.close()
    return text


ALTERNATING = ["user:one", "assistant:two", "user:three", "assistant:four", "user:five"]


@pytest.mark.parametrize("name", APPENDING)
@pytest.mark.parametrize("system", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_markers_join_to_the_rendering(name: str, system: bool, count: int) -> None:
    t = template(APPENDING[name])
    pairs = [*(["system:rules"] if system else []), *ALTERNATING[:count]]
    expected = t.render(messages_of(*pairs), False)
    if name == "qwen3" and count in (2, 4):
        expected = expected.replace("<think>\n\n</think>\n\n", "")  # only where it comes last
    assert play(t, *pairs) == expected


@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma", "qwen3"])
@pytest.mark.parametrize("count", [1, 3])
def test_an_assistant_opens_as_the_generation_prompt_does(name: str, count: int) -> None:
    t = template(APPENDING[name])
    session = t.session()
    text = ""
    for message in messages_of(*ALTERNATING[:count]):
        text += session.open(message["role"]).prefix + message["content"] + session.close()
    text += session.open("assistant").prefix
    assert text == t.render(messages_of(*ALTERNATING[:count]), True)


def test_a_system_message_inside_the_users() -> None:
    session = template(MISTRAL).session()
    assert session.open("system") == Opening("<s>[INST] ")
    assert session.close() == ""
    assert session.open("user") == Opening("\n\n")
    assert session.close() == "[/INST]"
    assert session.open("assistant") == Opening(" ")
    assert session.close() == "</s>"
    assert session.open("user") == Opening("[INST] ")


def test_a_default_system_message_is_part_of_the_first_marker() -> None:
    session = template(CHATML).session()
    assert session.open("user").prefix == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n"
    )
    alone = template(CHATML).session()
    assert alone.open("assistant").prefix.startswith("<|im_start|>system\nBe kind.")


def test_what_the_template_strips() -> None:
    llama, chatml = template(LLAMA3).session(), template(CHATML).session()
    assert llama.open("user").strips and not chatml.open("user").strips
    gemma = template(GEMMA).session()
    assert not gemma.open("system").strips
    gemma.close()
    assert gemma.open("user").strips


def test_rewritten_history_is_noticed_and_given_anew() -> None:
    session = template(REWRITING).session()
    assert session.open("user") == Opening("[user last]")
    assert session.close() == "\n"
    anew = ("[user]", 0, "\n[assistant last]")
    assert session.open("assistant") == Opening("[assistant last]", anew)
    assert session.close() == "\n"
    anew = ("[user]", 0, "\n[assistant]", 1, "\n[user last]")
    assert session.open("user") == Opening("[user last]", anew)


def test_contents_that_move_are_named_by_their_number() -> None:
    """A system message that always stands with the last user message."""
    session = template(MISTRAL_LAST).session()
    for role in ("system", "user", "assistant"):
        session.open(role)
        session.close()
    opening = session.open("user")
    assert opening.rewrites == ("<s>[INST] ", 1, "[/INST] ", 2, "</s>[INST] ", 0, "\n\n")


def test_roles_that_are_refused() -> None:
    session = template(GEMMA).session()
    with pytest.raises(BadInputError, match="Roles must alternate"):
        session.open("assistant")
    assert session.open("user").prefix == "<s><start_of_turn>user\n"
    session.close()
    with pytest.raises(BadInputError, match="Roles must alternate"):
        session.open("user")
    assert session.open("assistant").prefix == "<start_of_turn>model\n"


def test_a_message_that_would_not_come_last() -> None:
    session = template(HOISTING).session()
    session.open("user")
    session.close()
    with pytest.raises(BadInputError, match="no place for a system message after user"):
        session.open("system")


def test_a_template_that_shows_no_content() -> None:
    with pytest.raises(BadInputError, match="no place for a user message after nothing"):
        template("nothing").session().open("user")


def test_nesting() -> None:
    session = template(CHATML).session()
    with pytest.raises(ProgramError, match="no message is open"):
        session.close()
    session.open("user")
    with pytest.raises(ProgramError, match="still open"):
        session.open("user")


def test_forks_grow_apart() -> None:
    session = template(CHATML).session()
    session.open("user")
    left, right = session.fork(), session.fork()
    for branch in (left, right, session):
        assert branch.close() == "<|im_end|>\n"
    assert left.open("assistant").prefix == "<|im_start|>assistant\n"
    assert right.open("user").prefix == "<|im_start|>user\n"
    assert session.open("system").prefix == "<|im_start|>system\n"


@settings(max_examples=60, deadline=None)
@given(
    roles=st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), max_size=6),
    name=st.sampled_from(["chatml", "llama3"]),
)
def test_any_order_of_roles(roles: list[str], name: str) -> None:
    t = template(APPENDING[name])
    pairs = [f"{role}:content{i}" for i, role in enumerate(roles)]
    if pairs:
        assert play(t, *pairs) == t.render(messages_of(*pairs), False)


def test_a_refusal_is_remembered_but_raised_anew() -> None:
    t = template(GEMMA)
    errors = []
    for _ in range(2):
        with pytest.raises(BadInputError) as caught:
            t.session().open("assistant")
        errors.append(caught.value)
    assert errors[0] is not errors[1]


def test_sentinels_never_show() -> None:
    t = template(CHATML)
    assert not re.search("[\ue000\ue001]", play(t, *ALTERNATING))
