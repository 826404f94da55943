"""The gateway as a process: what it imports, what it binds, how it starts and fails."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys

import pytest
import zmq
from ramet.runtime.config import EngineConfig
from ramet.runtime.gateway.assembly import bind, check_address
from ramet.runtime.gateway.curve import server_keys
from ramet.runtime.gateway.service import Service, ServiceLimits
from ramet.runtime.protocol import BackendError, BadInputError
from ramet.runtime.protocol.codec import client_codec, gateway_codec
from ramet.runtime.protocol.messages import Hello, Welcome


def test_it_imports_neither_torch_nor_transformers():
    code = (
        "import sys, ramet.runtime.gateway.__main__, ramet.runtime.gateway.assembly\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    ("address", "key", "allowed"),
    [
        ("ipc:///tmp/x", None, True),
        ("tcp://127.0.0.1:7411", None, True),
        ("tcp://localhost:7411", None, True),
        ("tcp://[::1]:7411", None, True),
        ("tcp://0.0.0.0:7411", None, False),
        ("tcp://*:7411", None, False),
        ("tcp://192.168.1.4:7411", None, False),
        ("tcp://0.0.0.0:7411", "key", True),
        ("udp://127.0.0.1:7411", "key", False),
    ],
)
def test_other_machines_need_a_key(address, key, allowed):
    if allowed:
        check_address(address, key is not None)
    else:
        with pytest.raises(BadInputError):
            check_address(address, key is not None)


def test_other_machines_may_be_let_in_without_one():
    check_address("tcp://0.0.0.0:7411", False, no_auth=True)


def _start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "ramet.runtime.gateway", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def test_bad_settings_are_told_on_stdout():
    process = _start(
        "--config", '{"model_path": "x", "nonsense": 1}', "--engine", "a", "--bind", "b"
    )
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "nonsense" in json.loads(out.splitlines()[-1])["error"]["message"]


def test_an_open_port_without_a_key_is_refused(tmp_path):
    process = _start(
        "--config", "{}", "--engine", f"ipc://{tmp_path}/e", "--bind", "tcp://0.0.0.0:0"
    )
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "API key" in json.loads(out.splitlines()[-1])["error"]["message"]


async def test_it_serves_when_the_engine_is_there_and_stops_when_told(world, tmp_path):
    """A config alone (random weights) brings a byte tokenizer, so no model is needed here."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 258,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 8,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 257,
        "bos_token_id": 256,
    }
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    settings = json.dumps({"model_path": str(folder / "config.json"), "load_format": "dummy"})
    address = f"ipc://{tmp_path}/gateway"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "ramet.runtime.gateway"),
        *("--config", settings, "--engine", world.engine_address),
        *("--bind", address, "--bind", "tcp://127.0.0.1:0"),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        ready = {}
        while not ready.get("ready"):
            line = await asyncio.wait_for(process.stdout.readline(), 60)
            assert line, "it ended before it was ready"
            ready = json.loads(line)
        assert ready["addresses"][0] == address
        assert ready["addresses"][1].startswith("tcp://127.0.0.1:")
        assert ready["context_length"] == 512
        world.address = ready["addresses"][1]
        assert isinstance(await world.client().greet(), Welcome)
    finally:
        process.send_signal(signal.SIGTERM)
        code = await asyncio.wait_for(process.wait(), 20)
    assert code == 0


def test_a_port_in_use_is_named_once_with_the_flag_for_another(tmp_path):
    with zmq.Context() as context, context.socket(zmq.ROUTER) as taken:
        address = f"tcp://127.0.0.1:{taken.bind_to_random_port('tcp://127.0.0.1')}"
        config = EngineConfig.from_settings({"zmq_port": int(address.rpartition(":")[2])})
        with pytest.raises(BackendError, match="--zmq-port") as caught:
            bind([address], config, ServiceLimits())
    assert str(caught.value).count(address) == 1
    assert "in use" in str(caught.value)
    with pytest.raises(BackendError) as caught:
        bind([f"ipc://{tmp_path}/nowhere/at-all"], config, ServiceLimits())
    assert "--zmq-port" not in str(caught.value)


async def test_curve_encrypts_tcp_and_leaves_ipc_alone(world, tmp_path):
    await world.client_of_engine.start(5)
    config = EngineConfig.from_settings({"curve": str(tmp_path / "keys")})
    socket, (ipc, tcp) = bind(
        ["tcp://127.0.0.1:0", f"ipc://{tmp_path}/gateway"], config, ServiceLimits()
    )
    service = Service(socket, world.executor, model="fake")
    world.services.append(service)
    keys = server_keys(tmp_path / "keys")
    assert (tmp_path / "keys" / "server.public").read_bytes() == keys.public
    assert (tmp_path / "keys" / "server.secret").stat().st_mode & 0o077 == 0

    def hello(address: str, server_key: bytes | None) -> bool:
        with zmq.Context() as context, context.socket(zmq.DEALER) as client:
            client.setsockopt(zmq.LINGER, 0)
            if server_key:
                public, secret = zmq.curve_keypair()
                client.curve_serverkey, client.curve_publickey = server_key, public
                client.curve_secretkey = secret
            client.connect(address)
            client.send(client_codec.encode(Hello(version=1)))
            if not client.poll(1000):
                return False
            return isinstance(gateway_codec.decode(client.recv()), Welcome)

    assert await asyncio.to_thread(hello, tcp, keys.public)
    assert await asyncio.to_thread(hello, ipc, None)
    assert not await asyncio.to_thread(hello, tcp, None)
    assert not await asyncio.to_thread(hello, tcp, zmq.curve_keypair()[0])
