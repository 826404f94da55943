"""`EngineConfig`: every setting of a runtime, with its default, its range and its help. Torch-free.

The command line's flags, the keywords of `Runtime` and the JSON that crosses to the child processes
are all made from these fields.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from .config_names import ABSENT, ALIASES
from .config_server import ServerConfig, says
from .protocol.errors import BadInputError
from .protocol.nearest import did_you_mean
from .scheduler.classes import parse_classes

API_KEY_VARIABLE = "RAMET_API_KEY"
ZMQ_PORT = 7411
"""Where programs' clients look first."""
KEY_VARIABLES = {
    "api_key": API_KEY_VARIABLE,
    "admin_key": "RAMET_ADMIN_KEY",
    "metrics_key": "RAMET_METRICS_KEY",
}
"""Settings that are secret, and the environment variables by which they reach a child."""
REPEATED = {"api_key": ",", "cors_origin": ",", "priority_classes": "\n"}
"""Settings whose flag may be given several times, or that may be a list, and what then joins
them."""


class UnknownSettingError(BadInputError, TypeError):
    """A setting that does not exist, or whose feature does not exist yet."""


class EngineConfig(ServerConfig, frozen=True, kw_only=True, omit_defaults=True):
    """Settings of one runtime: a gateway and its engine. Build it with `from_settings`."""

    model_path: Annotated[
        str, says("Alias, folder, .gguf file or hub id of the model.", min_length=1)
    ] = "smollm2-135m-instruct"
    tokenizer_path: (
        Annotated[str, says("Folder or file of the tokenizer, if not the model's own.")] | None
    ) = None
    load_format: Annotated[
        Literal["auto", "safetensors", "gguf", "dummy"],
        says("Where weights come from; dummy makes random ones from config.json alone."),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        says("Type to compute in. auto: bfloat16 where the hardware has it, else float32."),
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto"], says("Type of the KV cache. auto: the same as dtype.")
    ] = "auto"
    context_length: (
        Annotated[
            int, says("Longest prompt and answer together, in tokens. None: the model's.", ge=2)
        ]
        | None
    ) = None
    device: Annotated[
        Literal["auto", "cpu", "cuda"], says("Where to run. auto: cuda where there is one.")
    ] = "auto"
    page_size: Annotated[
        int, says("Grain of KV allocation in tokens; sharing is always by the token.", ge=1, le=1)
    ] = 1
    max_total_tokens: (
        Annotated[int, says("Slots of KV in all, in tokens. None: from the memory there is.", ge=2)]
        | None
    ) = None
    mem_fraction_static: Annotated[
        float, says("Share of the device's memory for weights and KV together.", gt=0.0, lt=1.0)
    ] = 0.85
    max_running_requests: Annotated[
        int, says("Requests that run at the same time.", ge=1, le=65536)
    ] = 256
    max_queued_requests: (
        Annotated[int, says("Requests that may wait; more are refused. None: 2^17.", ge=1)] | None
    ) = None
    max_queued_tokens: (
        Annotated[int, says("Prompt tokens that may wait; more are refused. None: 2^27.", ge=1)]
        | None
    ) = None
    priority_classes: (
        Annotated[
            str,
            says(
                "Named classes of requests as a JSON object, name to bounds: priority (lower goes "
                "first), max_running, max_queued, max_queued_tokens, context_length. interactive "
                "(0) and batch (10) are there without it."
            ),
        ]
        | None
    ) = None
    priority_ageing: Annotated[
        float, says("Seconds of waiting that are worth one step of priority.", gt=0.0)
    ] = 10.0
    chunked_prefill_size: (
        Annotated[
            int,
            says(
                "Prompt tokens computed in one step at most; -1: whole prompts. "
                "None: 512 on a CPU, 8192 on a GPU.",
                ge=-1,
            ),
        ]
        | None
    ) = None
    schedule_policy: Annotated[
        Literal["fcfs", "lpm", "dfs", "program"],
        says(
            "Who goes first: arrival, longest cached prefix, tree order, "
            "or the program with least to do."
        ),
    ] = "fcfs"
    schedule_ageing: Annotated[
        float,
        says("Seconds after which who waits goes before those that the policy prefers.", gt=0.0),
    ] = 5.0
    radix_eviction_policy: Annotated[
        Literal["lru", "lfu", "program"],
        says("What leaves the cache first; program keeps what live programs read again."),
    ] = "lru"
    disable_radix_cache: Annotated[bool, says("Share nothing between requests.")] = False
    host_cache_gb: Annotated[
        float,
        says("GiB of host memory for KV that left the device. 0: none.", ge=0.0, le=65536.0),
    ] = 0.0
    disk_cache_dir: (
        Annotated[
            str,
            says(
                "Folder for KV that left the device; what is there survives a restart. None: none.",
                min_length=1,
            ),
        ]
        | None
    ) = None
    disk_cache_gb: (
        Annotated[float, says("GiB that disk_cache_dir may take. None: 32.", gt=0.0, le=1048576.0)]
        | None
    ) = None
    disable_overlap_schedule: Annotated[
        bool, says("Do not schedule the next step while one runs.")
    ] = False
    disable_cuda_graph: Annotated[bool, says("Launch kernels one by one on CUDA.")] = False
    disable_tree_attention: Annotated[
        bool, says("On CUDA: every request reads its whole prefix, shared or not.")
    ] = False
    cuda_graph_max_bs: Annotated[
        int, says("Largest decode batch that is captured as a CUDA graph.", ge=1, le=4096)
    ] = 256
    enable_deterministic_inference: Annotated[
        bool,
        says(
            "On CUDA: the same request gives the same bits whatever runs beside it, is cached, or "
            "how it is cut into chunks. Slower."
        ),
    ] = False
    record_trace: (
        Annotated[
            str,
            says(
                "File to append to which requests came and which of them begin alike, for the"
                " simulator of policies; without text and tokens.",
                min_length=1,
            ),
        ]
        | None
    ) = None
    schedule_conservativeness: Annotated[
        float, says("Above 1 admits fewer requests and retracts less.", gt=0.0, le=100.0)
    ] = 1.0
    grammar_backend: Annotated[
        Literal["auto", "outlines", "automaton", "llguidance"],
        says("What compiles constraints on output. auto: by the kind of constraint."),
    ] = "auto"
    random_seed: (
        Annotated[
            int, says("Seed of dummy weights and unseeded draws. None: random.", ge=0, lt=2**31)
        ]
        | None
    ) = None
    served_model_name: (
        Annotated[str, says("Name the server gives the model. None: model_path.")] | None
    ) = None
    chat_template: (
        Annotated[str, says("Jinja file of a chat template to use instead of the model's own.")]
        | None
    ) = None
    tool_call_parser: Annotated[
        Literal[
            "auto", "none", "hermes", "qwen", "qwen25", "llama3", "llama3_json", "mistral",
            "pythonic", "llama4_pythonic", "deepseek", "deepseekv3", "deepseek_v3", "deepseekv31",
            "deepseek_v31",
        ],
        says("How the model writes calls of tools. auto: as its chat template shows."),
    ] = "auto"  # fmt: skip
    reasoning_parser: Annotated[
        Literal[
            "auto", "none", "think", "qwen3", "qwen3-thinking", "deepseek-r1", "deepseek_r1",
            "deepseek-v3", "deepseek_v3", "glm45", "step3", "kimi", "mistral", "seed-oss",
            "seed_oss",
        ],
        says("How the model marks its thinking. auto: as its chat template shows."),
    ] = "auto"  # fmt: skip
    trust_request_chat_template: Annotated[
        bool, says("Let requests bring chat templates of their own, rendered in a sandbox.")
    ] = False

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> EngineConfig:
        """Build from names and values, aliases included.

        Raises `UnknownSettingError` (also a TypeError) for a name that is not there and
        `BadInputError` for a value out of range, each naming the setting.
        """
        values: dict[str, Any] = {}
        for given, value in settings.items():
            name, value = _canonical(given, value)
            if name == "priority_classes" and isinstance(value, Mapping):
                value = msgspec.json.encode(value).decode()
            elif name in REPEATED and isinstance(value, (list, tuple)):
                value = REPEATED[name].join(map(str, value)) or None  # pyright: ignore
            if name in values:
                raise BadInputError(f"setting {name} is given twice", param=name)
            values[name] = value
        for name, value in values.items():
            values[name] = _checked(name, value)
        config = cls(**values)
        if config.chunked_prefill_size == 0:
            raise BadInputError(
                "chunked_prefill_size=0: must be at least 1, or -1 for whole prompts",
                param="chunked_prefill_size",
            )
        if config.api_key is not None and not config.api_keys:
            raise BadInputError("api_key holds no key", param="api_key")
        parse_classes(config.priority_classes)
        _check_tiers(config)
        if config.ssl_keyfile is not None and config.ssl_certfile is None:
            raise BadInputError("ssl_keyfile needs ssl_certfile", param="ssl_keyfile")
        return config

    @classmethod
    def from_json(cls, text: str | bytes) -> EngineConfig:
        """What a child process reads from its command line. Keys are not in there, as other users
        can read command lines: they come by the environment."""
        try:
            settings = msgspec.json.decode(text, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise BadInputError(f"settings are not a JSON object: {error}") from None
        for name, variable in KEY_VARIABLES.items():
            key = os.environ.get(variable)
            if key and settings.get(name) is None:
                settings[name] = key
        return cls.from_settings(settings)

    def to_json(self, *, with_key: bool = False) -> str:
        """JSON of what differs from the defaults; keys only on demand."""
        without: dict[str, Any] = dict.fromkeys(KEY_VARIABLES)
        public = self if with_key else msgspec.structs.replace(self, **without)
        return msgspec.json.encode(public).decode()

    @property
    def api_keys(self) -> tuple[str, ...]:
        """The keys of ``api_key``, one by one."""
        return tuple(key for key in re.split(r"[\s,]+", self.api_key or "") if key)

    @property
    def cors_origins(self) -> tuple[str, ...]:
        return tuple(part.strip() for part in (self.cors_origin or "").split(",") if part.strip())

    @property
    def model_name(self) -> str:
        """What clients are told that the model is called."""
        return self.served_model_name or self.model_path


def _check_tiers(config: EngineConfig) -> None:
    if config.disk_cache_gb is not None and config.disk_cache_dir is None:
        raise BadInputError("disk_cache_gb needs disk_cache_dir", param="disk_cache_gb")
    for name in ("host_cache_gb", "disk_cache_dir"):
        if config.disable_radix_cache and getattr(config, name):
            raise BadInputError(f"{name}: disable_radix_cache leaves nothing to keep", param=name)


class Setting(NamedTuple):
    """One field, for whoever makes flags or documentation of it. ``type`` is int, float, bool or
    str; ``choices`` is empty where any value in range will do."""

    name: str
    type: type
    default: Any
    choices: tuple[str, ...]
    optional: bool
    help: str


@functools.cache
def _hints() -> dict[str, Any]:
    return get_type_hints(EngineConfig, include_extras=True)


def settings() -> list[Setting]:
    """All settings in order of declaration."""
    found: list[Setting] = []
    hints = _hints()
    for field in msgspec.structs.fields(EngineConfig):
        hint = hints[field.name]
        optional = type(None) in get_args(hint)
        base, meta = get_args(get_args(hint)[0] if optional else hint)
        choices = get_args(base) if get_origin(base) is Literal else ()
        found.append(
            Setting(
                field.name,
                str if choices else base,
                field.default,
                choices,
                optional,
                str(meta.description),
            )
        )
    return found


def _canonical(given: str, value: Any) -> tuple[str, Any]:
    name = given.replace("-", "_")
    if name in EngineConfig.__struct_fields__:
        return name, value
    if name in ABSENT:
        raise UnknownSettingError(f"setting {given}: not supported: {ABSENT[name]}", param=given)
    if name in ALIASES:
        return ALIASES[name], (not value if name == "enable_prefix_caching" else value)
    known = [*EngineConfig.__struct_fields__, *ALIASES]
    hint = did_you_mean(name, known)
    raise UnknownSettingError(f"unknown setting {given}{hint}", param=given)


def _checked(name: str, value: Any) -> Any:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    try:
        return msgspec.convert(value, _hints()[name])
    except msgspec.ValidationError as error:
        reason = re.sub(r" - at `\$`$", "", str(error)).replace("`", "").replace("null", "None")
        allowed = next(s.choices for s in settings() if s.name == name)
        if allowed:
            reason = f"expected one of {', '.join(allowed)}"
        reason = reason[:1].lower() + reason[1:]
        raise BadInputError(f"{name}={value!r}: {reason}", param=name) from None
