"""The embedded runtime, with the real model behind it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import pytest
import ramet as rt
from ramet.backends.embedded import OF_SERVERS
from ramet.runtime.config import settings

pytestmark = pytest.mark.model
MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="module", autouse=True)
def polite_threads():
    """Threads of the engine that spin while they wait starve whoever shares the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_WAIT_POLICY", "PASSIVE")
        yield


@pytest.fixture(scope="module")
def runtime(polite_threads):
    with rt.Runtime(MODEL, dtype="float32", max_total_tokens=8192) as runtime:
        yield runtime


@rt.function
def tips(s, topic):
    s += rt.system("You are terse.")
    s += rt.user(f"Give two tips about {topic}.")
    forks = s.fork(2)
    for i, branch in enumerate(forks):
        branch += rt.assistant(f"Tip {i + 1}: " + rt.gen("tip", max_tokens=12, stop="\n"))
    s += rt.assistant(
        f"1. {forks[0]['tip']}\n2. {forks[1]['tip']}\nBest: " + rt.select("best", ["1", "2"])
    )


def test_lazy_compiled_and_streamed_make_the_same_text(runtime):
    lazy = tips.run("sleep", backend=runtime, temperature=0)
    compiled = tips.compile().run("sleep", backend=runtime, temperature=0)
    streamed = tips.run("sleep", backend=runtime, temperature=0, stream=True)
    assert "".join(streamed.text_iter()) == lazy.text() == compiled.text() == streamed.text()
    assert lazy.text().startswith("<|im_start|>system\nYou are terse.<|im_end|>\n")
    assert lazy["best"] == compiled["best"]
    meta = lazy.get_meta_info("best")
    assert meta["choices"] == ["1", "2"]
    assert len(meta["input_token_logprobs"]) == len(meta["normalized_prompt_logprobs"]) == 2
    assert compiled.get_meta_info("best")["cached_tokens"] > 30


def test_a_flush_in_the_middle_changes_no_tokens(runtime):
    """Text is cut only where something is generated, never where it was sent."""

    @rt.function
    def whole(s, ask):
        s += "The cap"
        if ask:
            s.text()
        s += "ital of Fra"
        if ask:
            time.sleep(0.01)
            s.sync()
        s += "nce is" + rt.gen("x", max_tokens=8, return_logprob=True)

    one = whole.run(ask=False, backend=runtime, temperature=0)
    other = whole.run(ask=True, backend=runtime, temperature=0)
    assert one["x"] == other["x"]
    ids = [
        [token for _, token, _ in state.get_meta_info("x")["output_token_logprobs"]]
        for state in (one, other)
    ]
    assert ids[0] == ids[1]
    assert one.get_meta_info("x")["prompt_tokens"] == other.get_meta_info("x")["prompt_tokens"]


def test_generate(runtime):
    prompt = "The capital of France is"
    reply = runtime.generate(prompt, sampling_params={"max_new_tokens": 6, "temperature": 0})
    assert len(reply["output_ids"]) == reply["meta_info"]["completion_tokens"] == 6
    ids = runtime.tokenizer.encode(prompt)
    same = runtime.generate(input_ids=ids, sampling_params={"max_new_tokens": 6, "temperature": 0})
    assert same["output_ids"] == reply["output_ids"]
    assert same["meta_info"]["cached_tokens"] > 0
    steps = list(
        runtime.generate(
            prompt, sampling_params={"max_new_tokens": 6, "temperature": 0}, stream=True
        )
    )
    assert steps[-1]["text"] == reply["text"]
    assert steps[-1]["output_ids"] == reply["output_ids"]
    assert len(steps) >= 6
    scored = runtime.generate(
        prompt, sampling_params={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0
    )
    entries = scored["meta_info"]["input_token_logprobs"]
    assert [token for _, token, _ in entries] == ids
    assert entries[0][0] is None
    with pytest.raises(rt.ContextLengthError):
        runtime.generate(input_ids=[5] * (runtime.context_length + 1))


async def test_async_generate(runtime):
    params = {"max_new_tokens": 4, "temperature": 0}
    replies = await asyncio.gather(
        *(runtime.async_generate(f"Number {i}", sampling_params=params) for i in range(6))
    )
    assert all(len(reply["output_ids"]) == 4 for reply in replies)


def test_a_batch_with_a_bad_item(runtime):
    @rt.function
    def f(s, word):
        s += word + rt.gen("x", max_tokens=4)

    states = f.run_batch(
        [("a",), ("word " * (runtime.context_length + 5),), ("c",)], backend=runtime
    )
    assert states[0]["x"]
    assert states[2]["x"]
    with pytest.raises(rt.ContextLengthError, match=r"test_runtime\.py"):
        states[1]["x"]


def test_abort_and_idle(runtime):
    @rt.function
    def f(s):
        s += "Once upon a time" + rt.gen("x", max_tokens=4000, ignore_eos=True)

    state = f.run(backend=runtime, stream=True)
    next(state.text_iter("x"))
    state.cancel()
    with pytest.raises(rt.AbortedError):
        state["x"]
    deadline = time.monotonic() + 5
    while runtime.server_info()["pages"]["held"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    runtime.flush_cache()
    info = runtime.server_info()
    assert info["pages"]["free"] == info["pages"]["total"]
    assert info["requests"] == {"running": 0, "waiting": 0}


def test_settings_are_checked():
    with pytest.raises(TypeError, match="max_total_toke"):
        rt.Runtime(MODEL, max_total_toke=1)
    with pytest.raises(ValueError, match="page_size"):
        rt.Runtime(MODEL, page_size=-1)
    with pytest.raises(rt.ModelError, match="no-such-model"):
        rt.Runtime("no-such-model")


@pytest.mark.parametrize(
    "setting",
    [
        {"port": 18222}, {"host": "0.0.0.0"}, {"zmq-port": 1}, {"ssl_certfile": "x.pem"},
        {"cors_origin": ["*"]}, {"max_body_bytes": 2048}, {"tool_call_parser": "hermes"},
    ],
)  # fmt: skip
def test_settings_of_servers_do_nothing_and_that_is_said(setting):
    (name,) = setting
    with (
        pytest.warns(UserWarning, match=f"setting {name} is of `ramet serve`"),
        pytest.raises(rt.ModelError),
    ):
        rt.Runtime("no-such-model", **setting)


def test_settings_of_servers_are_settings():
    """Keys are none: the runtime's own socket asks for them too."""
    assert {setting.name for setting in settings()} >= OF_SERVERS
    assert not OF_SERVERS & {"api_key", "api_key_file", "admin_key", "restart_engine"}
    with pytest.raises(rt.ModelError, match="no-such-model"):
        rt.Runtime("no-such-model", api_key="k", ssl_certfile=None)


@pytest.mark.parametrize("victim", ["engine", "gateway"])
def test_a_killed_process_fails_every_reader(runtime, victim):
    """Two runtimes at once; killing a process of one leaves the other as it was."""
    other = rt.Runtime(MODEL, max_total_tokens=4096)
    try:

        @rt.function
        def f(s):
            s += "Once upon a time" + rt.gen("x", max_tokens=4000, ignore_eos=True)

        state = f.run(backend=other, stream=True)
        next(state.text_iter("x"))
        errors: list[tuple[float, BaseException]] = []

        def read(call) -> None:
            try:
                call()
            except BaseException as error:
                errors.append((time.monotonic(), error))

        calls = [
            lambda: state["x"],
            lambda: list(state.text_iter()),
            lambda: other.generate("a", sampling_params={"max_new_tokens": 4000}),
        ]
        threads = [threading.Thread(target=read, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        began = time.monotonic()
        os.kill(other.launched.pids[victim], signal.SIGKILL)
        for thread in threads:
            thread.join(8)
        read(lambda: f.run(backend=other)["x"])
        read(other.server_info)
        assert len(errors) == 5
        assert all(isinstance(error, rt.BackendError) for _, error in errors)
        assert all(when - began < 5 for when, _ in errors)
        assert tips.run("tea", backend=runtime)["best"] in ("1", "2")
    finally:
        other.shutdown()
    with pytest.raises(rt.BackendError):
        other.generate("a")
