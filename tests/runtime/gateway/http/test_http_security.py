"""Who may ask for what, over which transport, and what one client learns of another."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from pathlib import Path

import httpx
import msgspec
import pytest
from ramet.runtime import launch
from ramet.runtime.config import EngineConfig
from ramet.runtime.gateway import origin
from ramet.runtime.gateway.http import intake
from ramet.runtime.gateway.http.guard import METRICS_PATHS, OPEN_PATHS
from ramet.runtime.gateway.http.server import tls_context
from ramet.runtime.keys import Keys, check_keys, read_keys
from ramet.runtime.program.instructions import Gen, Text
from ramet.runtime.protocol.errors import BadInputError, RametError
from ramet.runtime.protocol.messages import Generate

COMPLETION = {"prompt": "ab", "max_tokens": 3}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# --- keys ---------------------------------------------------------------------------------------


def test_every_key_has_an_owner_of_its_own():
    keys = Keys(["one", "two", "one"])
    owners = [keys.owner(b"one"), keys.owner(b"two")]
    assert None not in owners
    assert len(set(owners)) == 2
    assert keys.owner(b"one") == Keys("one").owner(b"one")
    for wrong in (b"", b"on", b"one ", b"three", b"one,two"):
        assert keys.owner(wrong) is None
    assert not Keys()
    assert not Keys(None)
    assert Keys().owner(b"") is None


def test_all_keys_are_compared_in_constant_time(monkeypatch):
    asked = []

    def compare(left, right):
        asked.append(right)
        return left == right

    monkeypatch.setattr("ramet.runtime.keys.hmac.compare_digest", compare)
    keys = Keys(["a", "b", "c"])
    assert keys.owner(b"a") is not None
    assert len(asked) == 3, "it stopped at the one that fits"


def test_keys_of_a_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# ours\nfirst\n\n  second  \n")
    assert read_keys(str(path)) == ("first", "second")
    path.write_text("# none\n")
    with pytest.raises(BadInputError, match="holds no key"):
        read_keys(str(path))
    with pytest.raises(BadInputError, match="cannot read"):
        read_keys(str(tmp_path / "absent"))
    for wrong in ("a b", "a,b", "é", ""):
        with pytest.raises(BadInputError, match="key 2") as caught:
            check_keys(["good", wrong], "api_key")
        assert not wrong or wrong not in str(caught.value), "a secret is repeated"


def test_keys_may_be_several_and_never_none():
    for given in ("a,b", "a b", ["a", "b"], ("a", "b")):
        assert EngineConfig.from_settings({"api_key": given}).api_keys == ("a", "b")
    for nothing in (",", " , "):
        with pytest.raises(BadInputError, match="holds no key"):
            EngineConfig.from_settings({"api_key": nothing})


async def test_each_of_several_keys_is_let_in(new_site):
    site = await new_site(api_key=["one", "two"])
    for key, status in (("one", 200), ("two", 200), ("three", 401), ("one,two", 401)):
        reply = await site.http.get("/v1/models", headers=bearer(key))
        assert reply.status_code == status
    assert (await site.http.get("/health", headers=bearer("three"))).status_code == 200


async def test_admin_and_metrics_have_keys_of_their_own(new_site):
    site = await new_site(api_key="user", admin_key="admin", metrics_key="metrics")
    wanted = {
        "/flush_cache": {"admin"},
        "/metrics": {"metrics", "admin"},
        "/v1/models": {"user", "admin"},
        "/server_info": {"user", "admin"},
        "/health": {"user", "admin", "metrics", "other"},
    }
    for path, allowed in wanted.items():
        for key in ("user", "admin", "metrics", "other"):
            reply = await site.http.get(path, headers=bearer(key))
            known = path == "/flush_cache" and key == "user"
            refusal = 403 if known else 401
            assert reply.status_code == (200 if key in allowed else refusal), (path, key)


async def test_a_good_key_that_is_not_the_admin_s_is_told_which_key_is_wanted(new_site):
    site = await new_site(api_key="user", admin_key="admin")
    for path in ("/flush_cache", "/v1/cache/tree"):
        reply = await site.http.get(path, headers=bearer("user"))
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, 403)
        assert "takes the admin key (--admin-key)" in reply.json()["error"]["message"]
        assert (await site.http.get(path, headers=bearer("other"))).status_code == 401


async def test_an_admin_s_key_alone_closes_only_what_is_the_admin_s(new_site):
    site = await new_site(admin_key="admin")
    assert (await site.http.get("/v1/models")).status_code == 200
    assert (await site.http.get("/flush_cache")).status_code == 401
    assert (await site.http.get("/flush_cache", headers=bearer("admin"))).status_code == 200


async def test_no_spelling_of_a_path_gets_round_the_keys(new_site):
    site = await new_site(api_key="user", admin_key="admin", metrics_key="metrics")
    for path in ("/flush_cache/", "//flush_cache", "/%66lush_cache", "/./flush_cache",
                 "/health/../flush_cache", "/metrics/", "/%6detrics", "/FLUSH_CACHE"):  # fmt: skip
        for key in ("user", "wrong"):
            reply = await site.http.request("GET", site.url + path, headers=bearer(key))
            assert reply.status_code in (307, 401, 403, 404), (path, key, reply.status_code)
            assert "success" not in reply.text
            assert "ramet:" not in reply.text
    assert not site.engine.submits


async def test_every_path_but_the_open_ones_asks_for_a_key(new_site):
    site = await new_site(api_key="user")
    paths = (await site.http.get("/openapi.json")).json()["paths"]
    assert len(paths) > 15
    for path, methods in paths.items():
        if path in OPEN_PATHS | METRICS_PATHS:
            continue
        for method in methods:
            where = path.replace("{", "").replace("}", "")
            reply = await site.http.request(method, where, headers=bearer("wrong"))
            assert reply.status_code == 401, (method, path)
    assert (await site.http.get("/openapi.json", headers=bearer("wrong"))).status_code == 401


@pytest.mark.parametrize("all_of_them", [False, True])
async def test_a_key_aborts_only_its_own(new_site, all_of_them):
    site = await new_site(api_key=["one", "two"], admin_key="admin")
    site.engine.idle = True
    body = {**COMPLETION, "request_id": "same"}
    running = [
        asyncio.create_task(site.http.post("/v1/completions", json=body, headers=bearer(key)))
        for key in ("one", "two")  # the same id twice: they do not know of each other
    ]
    await site.world.settle(lambda: len(site.engine.running) == 2)
    asked = {"abort_all": True} if all_of_them else {"rid": "cmpl-same"}
    reply = await site.http.post("/abort", json=asked, headers=bearer("two"))
    assert reply.json() == {"aborted": 1}
    assert (await running[1]).status_code == 499
    assert not running[0].done()
    reply = await site.http.post("/abort", json={"abort_all": True}, headers=bearer("admin"))
    assert reply.json() == {"aborted": 1}
    assert (await running[0]).status_code == 499


# --- what one key cached, no other hits -----------------------------------------------------------


async def test_namespaces_follow_key_and_salt(new_site):
    site = await new_site(api_key=["one", "two"])
    for key, salt in (("one", None), ("one", "x"), ("two", None), ("two", "x"), ("one", None)):
        body = {**COMPLETION, "cache_salt": salt}
        reply = await site.http.post("/v1/completions", json=body, headers=bearer(key))
        assert reply.status_code == 200
    spaces = [submit.namespace for submit in site.engine.submits]
    assert len(set(spaces[:4])) == 4
    assert spaces[4] == spaces[0]
    assert all(len(space) == 32 for space in spaces)


async def test_owner_and_salt_cannot_pass_for_each_other(world):
    executor = world.executor
    spaces = set()
    for owner in (b"", b"a", b"a\1b"):
        for salt in (None, "", "b", "a"):
            with origin.of(origin.Origin(owner)):
                spaces.add(executor.namespace(salt))
    assert len(spaces) == 12


async def test_programs_and_requests_over_the_other_port_are_as_separate(world):
    await world.serve(api_key=["one", "two"])
    for key in ("one", "two"):
        client = world.client(api_key=key)
        await client.greet()
        client.send(Generate(rid="r", prompt="ab", sampling={"max_new_tokens": 2}))
        await client.next()
        client.open([Text(parts=("ab",)), Gen(op=0, name="x", sampling={"max_new_tokens": 2})])
        await client.events()
    spaces = [submit.namespace for submit in world.engine.submits]
    assert len(spaces) == 4
    assert spaces[0] == spaces[1] != spaces[2] == spaces[3]


@pytest.mark.parametrize(("given", "number", "name"), [("batch", 0, "batch"), (-4, -4, "")])
async def test_a_connection_has_a_priority_beside_its_key(world, given, number, name):
    await world.serve(api_key="one")
    client = world.client(api_key="one")
    client.hello = msgspec.structs.replace(client.hello, priority=given)
    await client.greet()
    client.send(Generate(rid="r", prompt="ab", sampling={"max_new_tokens": 2}))
    await client.next()
    client.open([Text(parts=("ab",)), Gen(op=0, name="x", sampling={"max_new_tokens": 2})])
    await client.events()
    submits = world.engine.submits
    assert [(s.priority, s.cls) for s in submits] == [(number, name)] * 2
    assert all(s.namespace for s in submits)
    refused = world.client(api_key="one")
    refused.hello = msgspec.structs.replace(refused.hello, priority=10**9)
    assert "priority" in (await refused.greet()).error.message


def test_no_key_hits_what_another_cached(launched):
    """The real engine's tree, over HTTP."""
    running = launched(api_key="one,two")
    body = {"prompt": "what nobody else must see " * 4, "max_tokens": 2}

    def cached(key: str, **more: str) -> int:
        reply = httpx.post(
            f"{running.url}/v1/completions", json=body | more, headers=bearer(key), timeout=30
        )
        return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("one") == 0
    assert cached("one") > 90
    assert cached("two") == 0
    assert cached("two") > 90
    assert cached("two", cache_salt="x") == 0
    assert cached("one", cache_salt="x") == 0
    assert cached("one", cache_salt="x") > 90


# --- bounds ---------------------------------------------------------------------------------------


async def test_too_many_choices_are_refused(site):
    site.state.limits = type(site.state.limits)(samples=4)
    reply = await site.post("/v1/completions", prompt=["a", "b", "c"], n=2, max_tokens=1)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "n"
    assert (await site.post("/v1/completions", prompt=["a", "b"], n=2, max_tokens=1)).is_success


async def send_raw(site, *parts: bytes) -> bytes:
    """What the server answers to bytes, until it hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", site.server.url.rpartition(":")[2])
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        return await asyncio.wait_for(reader.read(), 10)
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_a_head_without_end_is_cut_off(site):
    """Headers are kept until they are whole, so they are counted while they come."""
    begun = b"GET /health HTTP/1.1\r\nhost: x\r\n"
    flood = [b"x-%d: %s\r\n" % (i, b"v" * 1000) for i in range(300)]
    assert b" 431 " in (await send_raw(site, begun, *flood)).split(b"\r\n")[0]
    one = await send_raw(site, begun, b"x: ", *[b"v" * 10_000] * 30)
    assert b" 431 " in one.split(b"\r\n")[0]
    assert b'"code":431' in one


async def test_a_large_body_after_a_small_head_in_one_piece_is_no_flood(site):
    body = b'{"prompt": "ab", "max_tokens": 1, "user": "%s"}' % (b"x" * 200_000)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    answer = await send_raw(site, head + b"content-length: %d\r\n\r\n" % len(body) + body)
    assert answer.startswith(b"HTTP/1.1 200")


async def test_a_head_that_never_ends_is_given_up(site, monkeypatch):
    monkeypatch.setattr(intake, "HEAD_S", 0.1)
    late = await send_raw(site, b"GET /health HTTP/1.1\r\nhost: x\r\n")
    assert late.startswith(b"HTTP/1.1 408")
    assert await send_raw(site, b"") == b""


# --- browsers and HTTPS ---------------------------------------------------------------------------

ASKS = {
    "Origin": "https://pages.example",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


async def test_pages_may_not_call_unless_told(site):
    reply = await site.http.options("/v1/completions", headers=ASKS)
    assert reply.status_code == 405
    reply = await site.http.get("/v1/models", headers={"Origin": "https://pages.example"})
    assert "access-control-allow-origin" not in reply.headers


async def test_pages_of_an_origin_may_call(new_site):
    site = await new_site(api_key="key", serving={"cors_origins": ["https://pages.example"]})
    reply = await site.http.options("/v1/completions", headers={**ASKS, "Authorization": ""})
    assert reply.status_code == 200, "the browser's question holds no key"
    assert reply.headers["access-control-allow-origin"] == "https://pages.example"
    reply = await site.http.get(
        "/v1/models", headers={"Origin": "https://pages.example", "Authorization": ""}
    )
    assert reply.status_code == 401
    assert reply.headers["access-control-allow-origin"], "a page is told why"
    other = await site.http.options(
        "/v1/models", headers={**ASKS, "Origin": "https://evil.example"}
    )
    assert other.status_code == 400
    assert "access-control-allow-origin" not in other.headers


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    paths = str(folder / "cert.pem"), str(folder / "key.pem")
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
         "-out", paths[0], "-keyout", paths[1]],
        capture_output=True,
    )  # fmt: skip
    if made.returncode:
        pytest.skip("no openssl to make a certificate with")
    return paths


async def test_https(new_site, certificate):
    site = await new_site(serving={"tls": tls_context(*certificate)})
    assert site.server.url.startswith("https://127.0.0.1:")
    trusting = ssl.create_default_context(cafile=certificate[0])
    async with httpx.AsyncClient(verify=trusting, base_url=site.server.url) as client:
        assert (await client.get("/health")).status_code == 200
        reply = await client.post("/v1/completions", json=COMPLETION)
        assert reply.json()["usage"]["prompt_tokens"] > 0
    with pytest.raises(httpx.HTTPError):
        await site.http.get(site.server.url.replace("https", "http") + "/health")


def test_a_server_with_a_certificate_serves_https_alone(launched, certificate):
    certfile, keyfile = certificate
    running = launched(ssl_certfile=certfile, ssl_keyfile=keyfile)
    assert running.url.startswith("https://")
    trusting = ssl.create_default_context(cafile=certfile)
    assert httpx.get(running.url + "/health", verify=trusting).status_code == 200
    with pytest.raises(httpx.HTTPError):
        httpx.get(running.url.replace("https", "http") + "/health")


def test_files_that_are_no_certificate_are_named(certificate, tmp_path):
    certfile, keyfile = certificate
    bad = tmp_path / "bad.pem"
    bad.write_text("nothing")
    for files in ((str(bad), None), (certfile, str(bad)), (certfile, None), ("absent", keyfile)):
        with pytest.raises(BadInputError, match="cannot serve HTTPS") as caught:
            tls_context(*files)
        assert caught.value.param == "ssl_certfile"
    with pytest.raises(BadInputError, match="ssl_keyfile needs ssl_certfile"):
        EngineConfig.from_settings({"ssl_keyfile": keyfile})
    assert tls_context(None, None) is None


# --- other machines -------------------------------------------------------------------------------


def test_other_hosts_need_a_key_or_the_word_that_none_is_needed(tiny_settings):
    for host in ("0.0.0.0", "::"):
        with pytest.raises(RametError, match="no_auth"):
            launch.start({**tiny_settings, "host": host}, listen=True)


def test_a_key_of_a_file_reaches_the_server_and_no_command_line(launched, tmp_path):
    path = tmp_path / "keys"
    path.write_text("from-a-file\n")
    running = launched(host="0.0.0.0", api_key="given", api_key_file=str(path), admin_key="boss")
    port = running.url.rpartition(":")[2]
    for key, status in (("from-a-file", 200), ("given", 200), ("boss", 200), ("other", 401)):
        reply = httpx.get(f"http://127.0.0.1:{port}/v1/models", headers=bearer(key))
        assert reply.status_code == status
    for pid in running.pids.values():
        for secret in (b"from-a-file", b"given", b"boss"):
            assert secret not in Path(f"/proc/{pid}/cmdline").read_bytes()
    engine = Path(f"/proc/{running.pids['engine']}/environ").read_bytes()
    assert b"from-a-file" not in engine
    assert b"boss" not in engine
