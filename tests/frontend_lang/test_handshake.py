"""What a client says of a port that speaks something else."""

from __future__ import annotations

import socket
import threading

import pytest
import ramet as rt
import zmq


def _answering(answer: bytes) -> socket.socket:
    """A port where every connection that says something gets an answer and is closed."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client:
                client.recv(64)
                client.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    return listener


@pytest.mark.parametrize("key", [False, True])
def test_an_http_port_is_asked_about(key):
    """To a client without a key libzmq says what came; one with a key only sees that it is left."""
    server_key = zmq.curve_keypair()[0].decode() if key else None
    with _answering(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n") as listener:
        url = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(rt.BackendError, match="is it the HTTP port") as caught:
            rt.RuntimeEndpoint(url, server_key=server_key, timeout=1)
        listener.shutdown(socket.SHUT_RDWR)
    assert "encrypted" not in str(caught.value)


@pytest.mark.parametrize(
    ("encrypts", "key", "says"),
    [
        (True, False, "may want a server_key"),
        (True, True, "a wrong server_key"),
        (False, True, "a server without encryption"),
    ],
)
def test_keys_that_do_not_fit(encrypts, key, says):
    server = zmq.Context.instance().socket(zmq.ROUTER)
    if encrypts:
        server.curve_publickey, server.curve_secretkey = zmq.curve_keypair()
        server.curve_server = True
    port = server.bind_to_random_port("tcp://127.0.0.1")
    server_key = zmq.curve_keypair()[0].decode() if key else None
    try:
        with pytest.raises(rt.BackendError, match=says):
            rt.RuntimeEndpoint(f"tcp://127.0.0.1:{port}", server_key=server_key, timeout=5)
    finally:
        server.close(0)
