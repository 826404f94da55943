"""A running HTTP server over the fake engine, and the clients that people use."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from ramet.runtime import launch
from ramet.runtime.gateway.http.server import HttpServer, bind_http
from ramet.runtime.gateway.http.state import HttpLimits, HttpState, Live


class Site:
    """A server on a free port, its world behind it, and a plain client of it."""

    def __init__(self, world: Any, server: HttpServer, api_key: str | None) -> None:
        self.world = world
        self.engine = world.engine
        self.server = server
        self.state = server.state
        self.url = server.url
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        limits = httpx.Limits(max_connections=None)
        self.http = httpx.AsyncClient(
            base_url=server.url, headers=headers, timeout=10, limits=limits
        )
        self.openai = AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key=api_key or "none", max_retries=0, timeout=10
        )

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def lines(self, path: str, **body: Any) -> list[str]:
        """The data of all events of a stream."""
        reply = await self.post(path, **body, stream=True)
        assert reply.status_code == 200, reply.text
        events = reply.text.split("\n\n")
        assert events.pop() == ""
        assert all(event.startswith("data: ") for event in events)
        return [event.removeprefix("data: ") for event in events]

    async def idle(self) -> None:
        """Nothing of any request is left, here or in the engine."""
        await self.world.settle(
            lambda: (
                not (
                    self.state.runs
                    or self.engine.running
                    or self.world.client_of_engine.in_flight
                    or self.engine.handles
                )
            )
        )


@pytest.fixture
async def new_site(world: Any) -> AsyncIterator[Any]:
    sites: list[Site] = []

    async def make(
        *, limits: HttpLimits | None = None, api_key: str | None = None, loading: bool = False,
        defaults: dict[str, Any] | None = None, serving: dict[str, Any] | None = None,
        **options: Any,
    ) -> Site:  # fmt: skip
        state = HttpState(limits, api_key, **options)
        server = HttpServer(bind_http("127.0.0.1", 0), state, **(serving or {}))
        await server.started()
        if not loading:
            state.attach(Live(await world.serve(), "models/fake", defaults=defaults or {}))
        sites.append(Site(world, server, api_key))
        return sites[-1]

    yield make
    for site in sites:
        await site.http.aclose()
        await site.openai.close()
        await site.server.close()


@pytest.fixture
async def site(new_site: Any) -> Site:
    return await new_site()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A config alone: random weights and bytes as tokens, so that it starts at once."""
    path = tmp_path_factory.mktemp("tiny") / "config.json"
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 258,
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 16, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
        "eos_token_id": 257, "bos_token_id": 256,
    }  # fmt: skip
    path.write_text(json.dumps(config))
    return str(path)


@pytest.fixture(scope="session")
def tiny_settings(tiny_model: str) -> dict[str, Any]:
    """Settings of a server that a test may start, on free ports."""
    return {
        "model_path": tiny_model, "load_format": "dummy", "dtype": "float32", "port": 0,
        "zmq_port": 0, "max_total_tokens": 8192, "random_seed": 1, "served_model_name": "tiny",
    }  # fmt: skip


@pytest.fixture
def launched(tiny_settings: dict[str, Any]) -> Iterator[Any]:
    """Starts real servers: ``launched(api_key="k")`` gives a `Launched`."""
    running: list[launch.Launched] = []

    def start(**settings: Any) -> launch.Launched:
        running.append(launch.start({**tiny_settings, **settings}, listen=True))
        return running[-1]

    yield start
    for one in running:
        one.stop()


TOOLS_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}
{% endif %}TOOLS{% for tool in tools %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for m in messages if m.role != 'system' %}
{%- if m.role == 'tool' %}<|im_start|>user
<tool_response>{{ m.content }}</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{% if m.reasoning_content is defined %}<think>{{ m.reasoning_content }}</think>
{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""


@pytest.fixture
def speaking(site, new_tokenizer):
    """A site whose model has this template, and settings of its own."""

    def make(template=TOOLS_TEMPLATE, **settings):
        site.world.executor.context_length = 1 << 14
        if template is not None:
            site.world.executor.tokenizer = new_tokenizer(template)
        live = site.state.live
        site.state.live = Live(live.service, live.model_path, **settings)
        return site

    return make
