"""Why a prompt was not cached: over HTTP and ZMQ, of the real engine's tree; each sees its own."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import ramet as rt
from ramet.runtime import launch

ADMIN = "the-admin"
STEM = "the same beginning for all, "


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


class Client:
    def __init__(self, url: str, key: str | None) -> None:
        self.http = httpx.Client(base_url=url, headers=bearer(key), timeout=30)

    def complete(self, prompt: str, **more: Any) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **more}
        reply = self.http.post("/v1/completions", json=body)
        assert reply.is_success, reply.text
        return reply.json()

    def explain(self, prompt: Any, **more: Any) -> dict[str, Any]:
        reply = self.http.post("/v1/cache/explain", json={"prompt": prompt, **more})
        assert reply.is_success, reply.text
        return reply.json()

    def tree(self, **query: Any) -> httpx.Response:
        return self.http.get("/v1/cache/tree", params=query)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory, tiny_settings: dict[str, Any]) -> Any:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    running = launch.start(
        {
            **tiny_settings,
            "chat_template": str(template),
            "api_key": "one,two",
            "admin_key": ADMIN,
            "trust_request_chat_template": True,
        },
        listen=True,
    )
    yield running
    running.stop()


@pytest.fixture
def as_key(keyed: Any) -> Any:
    clients: list[Client] = []

    def make(key: str | None) -> Client:
        clients.append(Client(keyed.url, key))
        return clients[-1]

    yield make
    for client in clients:
        client.http.close()


def test_a_completion_says_where_it_left_the_cache(as_key):
    one = as_key("one")
    first = one.complete("completion: " + STEM + "first", explain=True)
    assert first["choices"][0]["explain"]["index"] < len("completion: ")
    answer = one.complete("completion: " + STEM + "second", explain=True)
    found = answer["choices"][0]["explain"]
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert found["index"] == cached == len("completion: " + STEM)
    assert found["reason"] == "differs"
    assert found["before"].endswith(STEM[-20:])
    assert found["after"] == "second"
    assert found["neighbour"].startswith("first")
    assert found["token"] == ord("s")
    assert found["neighbour_token"] == ord("f")
    assert "explain" not in one.complete("completion: " + STEM + "second")["choices"][0]


def test_the_same_prompt_again_was_all_there(as_key):
    one = as_key("one")
    one.complete("all of it is there")
    answer = one.complete("all of it is there", explain=True)
    found = answer["choices"][0]["explain"]
    assert (found["reason"], found["after"], found["token"]) == ("whole", "", None)
    assert found["index"] == answer["usage"]["prompt_tokens"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == found["index"] - 1


def test_streams_chats_and_the_native_form_say_it_too(as_key):
    one = as_key("one")
    body = {"prompt": "streams too", "max_tokens": 1, "explain": True, "stream": True}
    text = one.http.post("/v1/completions", json=body).text
    chunks = [json.loads(e[6:]) for e in text.split("\n\n") if e.startswith("data: {")]
    said = [c["choices"][0]["explain"] for c in chunks if "explain" in c["choices"][0]]
    assert len(said) == 1
    body = {"text": "streams too", "explain": True, "sampling_params": {"max_new_tokens": 1}}
    reply = one.http.post("/generate", json=body).json()
    assert reply["meta_info"]["explain"]["reason"] == "whole"
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    chat = {"max_tokens": 1, "explain": True, "chat_template": template}
    for content in ("hello", "help"):
        messages = [{"role": "user", "content": content}]
        reply = one.http.post("/v1/chat/completions", json={**chat, "messages": messages})
    assert reply.json()["choices"][0]["explain"]["before"].endswith("[user]hel")
    body = {**chat, "messages": [{"role": "user", "content": "held"}], "stream": True}
    text = one.http.post("/v1/chat/completions", json=body).text
    chunks = [json.loads(e[6:]) for e in text.split("\n\n") if e.startswith("data: {")]
    said = [c["choices"][0]["explain"] for c in chunks if "explain" in c["choices"][0]]
    assert [found["after"][:2] for found in said] == ["d"]
    assert said[0]["branches"] == 2


def test_responses_say_it_and_keep_it(as_key):
    one = as_key("one")

    def respond(text: str, **more: Any) -> httpx.Response:
        body = {"input": text, "max_output_tokens": 1, "explain": True, **more}
        reply = one.http.post("/v1/responses", json=body)
        assert reply.is_success, reply.text
        return reply

    respond("response: sun")
    said = respond("response: moon").json()
    assert said["explain"]["before"].endswith("<user>response: ")
    assert (said["explain"]["after"], said["explain"]["neighbour"][0]) == ("moon", "s")
    kept = one.http.get(f"/v1/responses/{said['id']}").json()
    assert kept["explain"] == said["explain"]
    text = respond("response: star", stream=True).text
    events = [json.loads(e.split("data: ")[1]) for e in text.split("\n\n") if "data: {" in e]
    told = [e for e in events if "explain" in e.get("response", ())]
    assert [e["type"] for e in told] == [events[-1]["type"]]
    assert told[0]["response"]["explain"]["after"] == "tar"
    assert "explain" not in respond("response: no", explain=False).json()
    wrong = one.http.post("/v1/responses", json={"input": "x", "explain": "yes"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "explain")


def test_no_key_and_no_salt_is_shown_anothers_text(as_key):
    one, two = as_key("one"), as_key("two")
    secret = "a secret of the first key"
    one.complete(secret)
    two.complete("a secret of", cache_salt="s")
    mine = one.explain(secret)["explanation"]
    assert mine["reason"] == "whole"
    for client, more in ((two, {}), (two, {"cache_salt": "s"}), (one, {"cache_salt": "s"})):
        for prompt in ("a secret of the", "a secret of nobody"):
            reply = client.explain(prompt, **more)
            assert "first key" not in json.dumps(reply)
            assert "elsewhere" not in reply
    salted = two.explain("a secret of nobody", cache_salt="s")["explanation"]
    assert salted["index"] == len("a secret of")
    asked = two.complete("a secret of the second", explain=True)
    assert "first key" not in json.dumps(asked)


def test_the_admin_is_shown_the_neighbour_of_another_key(as_key):
    as_key("one").complete("for the admin to find")
    reply = as_key(ADMIN).explain("for the admin to look at")
    assert reply["elsewhere"]["explanation"]["neighbour"].startswith("find")
    assert reply["elsewhere"]["namespace"]
    assert reply["explanation"]["index"] <= 1


def test_two_prompts_are_compared_without_the_cache(as_key):
    reply = as_key("two").explain("never seen: left", other="never seen: right")
    assert (reply["prompt_tokens"], reply["other_tokens"]) == (16, 17)
    found = reply["explanation"]
    assert (found["index"], found["after"], found["neighbour"]) == (12, "left", "right")
    same = as_key("two").explain("x y", other="x y")["explanation"]
    assert (same["index"], same["reason"], same["neighbour"]) == (3, "whole", None)
    longer = as_key("two").explain("x y z", other="x y")["explanation"]
    assert (longer["index"], longer["reason"]) == (3, "ends")


def test_it_can_be_asked_by_get_and_by_token_ids(as_key):
    one = as_key("one")
    query = {"prompt": "by get: a", "other": "by get: b"}
    reply = one.http.get("/v1/cache/explain", params=query).json()
    assert reply["explanation"]["after"] == "a"
    assert one.explain([1, 2, 3], other=[1, 2, 4])["explanation"]["index"] == 2


@pytest.mark.parametrize(
    ("body", "param"),
    [({}, None), ({"prompt": ""}, "prompt"), ({"prompt": "a", "other": ""}, "other"),
     ({"prompt": [99999]}, "input_ids"), ({"prompt": 5}, "prompt"),
     ({"prompt": "a" * 5000}, "prompt")],
)  # fmt: skip
def test_what_is_wrong_is_named(as_key, body, param):
    reply = as_key("one").http.post("/v1/cache/explain", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


def test_the_tree_is_the_admins(as_key):
    assert as_key(None).tree().status_code == 401
    assert as_key("one").tree().status_code == 403
    assert as_key(None).http.get("/v1/cache/tree/").status_code in (307, 401)
    assert as_key(ADMIN).tree().status_code == 200


def test_the_tree_comes_in_pages(as_key):
    one, admin = as_key("one"), as_key(ADMIN)
    for first in "abcdefg":
        one.complete(f"page {first} of the tree", cache_salt="pages")
    whole = admin.tree(limit=1000).json()
    assert whole["next"] is None
    texts = [node["text"] for node in whole["data"]]
    assert any(text.endswith("page ") for text in texts)
    assert any(text.startswith("g of the tree") for text in texts)
    node = next(n for n in whole["data"] if n["text"].endswith("page "))
    assert (node["size"], node["start"], node["children"]) == (5, 0, 7)
    assert node["hits"] >= 1
    shown, after = [], None
    while True:
        page = admin.tree(limit=3, **({} if after is None else {"after": after})).json()
        assert 1 <= len(page["data"]) <= 3
        shown += page["data"]
        after = page["next"]
        if after is None:
            break
    assert [n["id"] for n in shown] == [n["id"] for n in whole["data"]]


@pytest.mark.parametrize(
    ("query", "param"),
    [({"limit": "0"}, "limit"), ({"limit": "1001"}, "limit"), ({"limit": "-1"}, "limit"),
     ({"limit": "x"}, "limit"), ({"after": "x"}, "after"), ({"after": "1..2"}, "after"),
     ({"after": "9" * 30}, "after")],
)  # fmt: skip
def test_pages_are_bounded(as_key, query, param):
    reply = as_key(ADMIN).tree(**query)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


def test_a_place_that_is_gone_is_no_error(as_key):
    assert as_key(ADMIN).tree(after="999999.1").json() == {
        "object": "cache.tree", "data": [], "next": None,
    }  # fmt: skip


def test_without_an_admin_key_nobody_sees_the_tree(launched):
    running = launched()
    client = Client(running.url, None)
    assert client.explain("nothing yet")["explanation"]["reason"] == "empty"
    client.complete("salted", cache_salt="theirs")
    assert "elsewhere" not in client.explain("salted")
    refused = client.tree()
    assert refused.status_code == 403
    assert "admin key" in refused.json()["error"]["message"]
    client.http.close()


@pytest.mark.parametrize("scheme", ["tcp", "http"])
def test_programs_clients_ask_too(keyed, scheme):
    urls = [keyed.url, *keyed.addresses]
    url = next(url for url in urls if url.startswith(scheme))
    with rt.RuntimeEndpoint(url, api_key="two") as backend:
        for end in ("x", "y"):
            prompt = f"from python over {scheme}: {end}"
            reply = backend.generate(prompt, sampling_params={"max_new_tokens": 1}, explain=True)
        found = reply["meta_info"]["explain"]
        assert (found["after"], found["neighbour"][0]) == ("y", "x")
        assert found["index"] == reply["meta_info"]["cached_tokens"] == len(prompt) - 1
        live = backend.explain(f"from python over {scheme}: z")["explanation"]
        assert live["branches"] == 2
        assert backend.explain("ab", "ac")["explanation"]["neighbour"] == "c"
        with pytest.raises(rt.BadInputError):
            backend.generate("x", explain="yes")


@rt.function
def described(s, what, explain=None):
    s += f"described: {what}"
    s += rt.gen("first", max_tokens=2, explain=explain)
    s += " and "
    s += rt.gen("second", max_tokens=2)


@pytest.mark.parametrize("scheme", ["tcp", "http"])
def test_generations_of_programs_say_it(keyed, scheme):
    urls = [keyed.url, *keyed.addresses]
    url = next(url for url in urls if url.startswith(scheme))
    with rt.RuntimeEndpoint(url, api_key="two") as backend:
        described.run(f"{scheme} sun", backend=backend)
        state = described.run(f"{scheme} moon", explain=True, backend=backend)
        found = state.get_meta_info("first")["explain"]
        assert (found["after"], found["neighbour"][0]) == ("moon", "s")
        assert "explain" not in state.get_meta_info("second")
        compiled = described.compile()
        states = compiled.run_batch([{"what": f"{scheme} star"}], backend=backend)
        assert "explain" not in states[0].get_meta_info("first")


@rt.function
def plain(s, what):
    s += f"plain: {what}"
    s += rt.gen("first", max_tokens=2)
    s += " and "
    s += rt.gen("second", max_tokens=2)


def test_a_run_can_ask_for_all_its_generations(keyed):
    with rt.RuntimeEndpoint(keyed.addresses[0], api_key="two") as backend:
        plain.run("sun", backend=backend)
        state = plain.run("moon", backend=backend, explain=True)
        assert state.get_meta_info("first")["explain"]["after"] == "moon"
        second = state.get_meta_info("second")["explain"]
        # What this program generated is cached but for its last token, the text behind it is not.
        assert second["reason"] == "ends"
        assert second["after"].endswith(" and ")
        reply = backend.generate(
            "plain: st", sampling_params={"max_new_tokens": 1, "explain": True}
        )
        assert reply["meta_info"]["explain"]["after"] == "t"


@rt.function
def chosen(s, what, explain=None):
    s += f"chosen: {what}"
    s += rt.select("first", [" left", " right", " up"], explain=explain)
    s += rt.select("second", ["a", "b"])


@rt.function
def both(s, what):
    s += f"chosen: {what}"
    s += rt.select("first", [" left", " right", " up"])
    s += rt.gen("second", max_tokens=1)


def test_selections_say_it(keyed):
    with rt.RuntimeEndpoint(keyed.addresses[0], api_key="two") as backend:
        chosen.run("sun", backend=backend)
        state = chosen.run("moon", True, backend=backend)
        found = state.get_meta_info("first")["explain"]
        assert (found["after"], found["neighbour"][:3]) == ("moon", "sun")
        assert "explain" not in state.get_meta_info("second")
        state = both.run("moth", backend=backend, explain=True)
        assert state.get_meta_info("first")["explain"]["after"].startswith("th")
        assert state.get_meta_info("second")["explain"]["index"] >= len("chosen: moth")


def test_explain_must_be_true_or_false():
    with pytest.raises(rt.BadInputError, match="explain"):
        rt.gen("x", explain="yes")
    with pytest.raises(rt.BadInputError, match="explain"):
        rt.select("x", ["a"], explain=1.5)


def test_a_server_of_another_kind_does_not_know():
    state = described.run("x", explain=True, backend=rt.OpenAI("m", base_url="http://localhost:1"))
    with pytest.raises(rt.BadInputError, match="needs a runtime"):
        state["first"]
