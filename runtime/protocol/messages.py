"""The only words spoken between processes: client to gateway, and gateway to engine.

Every message is a tagged msgspec struct in msgpack. Arrays travel as little-endian bytes. Programs
and their events are defined in `ramet.runtime.program`; here they are carried as data."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from .errors import ErrorInfo
from .meta import MetaInfo
from .sampling import Constraint
from .trie import Trie

PROTOCOL_VERSION = 1


class _Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    pass


# --- client → gateway -----------------------------------------------------------------------------


class Hello(_Message, frozen=True, kw_only=True, tag="hello"):
    """First message of a connection. Answered by `Welcome`, or by `Refused`. ``priority`` is that
    of all that it will ask for: a number, lower goes first, or the name of a class."""

    version: int
    client: str = ""
    api_key: str | None = None
    priority: int | str | None = None


class OpenProgram(_Message, frozen=True, kw_only=True, tag="open"):
    """Start program ``pid`` (the client's number). ``program`` is a `Program` as plain data, or the
    ``key`` of one registered before. ``closed`` says that no `AppendProgram` will follow."""

    pid: int
    program: msgspec.Raw = msgspec.Raw()
    key: int | None = None
    args: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    stream: bool = False
    closed: bool = False
    cache_salt: str | None = None


class RegisterProgram(_Message, frozen=True, kw_only=True, tag="register"):
    """Keep a compiled program under ``key`` for later `OpenProgram`s of this connection."""

    key: int
    program: msgspec.Raw


class AppendProgram(_Message, frozen=True, kw_only=True, tag="append"):
    """More instructions for a program that is open."""

    pid: int
    instructions: msgspec.Raw
    closed: bool = False


class CancelProgram(_Message, frozen=True, kw_only=True, tag="cancel"):
    """Drop what has not run and abort what runs. Answered by a `Done` event."""

    pid: int


class Generate(_Message, frozen=True, kw_only=True, tag="generate"):
    """One prompt, without the language: text (special tokens parsed) or token ids, used as they
    are: a list, or int32 as bytes."""

    rid: str
    prompt: str | None = None
    input_ids: list[int] | bytes | None = None
    sampling: dict[str, Any] = {}
    stream: bool = False
    cache_salt: str | None = None
    explain: bool = False
    """Whether the end is to say where the prompt left what was cached."""


class AbortGenerate(_Message, frozen=True, kw_only=True, tag="abort"):
    """Abort exactly this request of this connection; unknown ids are ignored."""

    rid: str


class Control(_Message, frozen=True, kw_only=True, tag="control"):
    """Ask for something that is not a generation. Answered by `ControlReply`. ``explain``: where
    ``prompt`` leaves what is cached, or ``other``, where it is given."""

    id: int
    op: Literal["flush_cache", "server_info", "explain"]
    prompt: str | None = None
    other: str | None = None
    cache_salt: str | None = None


ClientMessage = (
    Hello
    | OpenProgram
    | RegisterProgram
    | AppendProgram
    | CancelProgram
    | Generate
    | AbortGenerate
    | Control
)

# --- gateway → client -----------------------------------------------------------------------------


class Welcome(_Message, frozen=True, kw_only=True, tag="welcome"):
    """The handshake's answer. ``tokenizer`` is a folder that a client on the same machine may
    read; ``spin_seconds`` is how long one there may wait awake: 0 where the server needs the
    cores."""

    version: int
    server: str
    model: str
    context_length: int
    tokenizer: str | None = None
    spin_seconds: float = 0.0


class Refused(_Message, frozen=True, kw_only=True, tag="refused"):
    """The connection, or a message of it, was not accepted. The connection itself lives on."""

    error: ErrorInfo


class ProgramEvents(_Message, frozen=True, kw_only=True, tag="events"):
    """Events of one program, in order. ``events`` is a list of `Event` as plain data."""

    pid: int
    events: msgspec.Raw


class Generated(_Message, frozen=True, kw_only=True, tag="generated"):
    """A piece of a `Generate` (``done`` false), or its end. Pieces hold what is new, the end of a
    request that did not stream holds all. One entry a sample."""

    rid: str
    texts: list[str]
    output_ids: list[list[int]]
    metas: list[MetaInfo]
    done: bool = True


class GenerateFailed(_Message, frozen=True, kw_only=True, tag="generate_failed"):
    rid: str
    error: ErrorInfo


class ControlReply(_Message, frozen=True, kw_only=True, tag="control_reply"):
    id: int
    data: dict[str, Any] = {}
    error: ErrorInfo | None = None


GatewayMessage = Welcome | Refused | ProgramEvents | Generated | GenerateFailed | ControlReply

# --- gateway → engine -----------------------------------------------------------------------------


class EngineSampling(_Message, frozen=True, kw_only=True, tag="sampling"):
    """Sampling with everything resolved: concrete length and seed, stops as bytes, stop ids with
    the model's own unless ``ignore_eos``."""

    max_new_tokens: int
    min_new_tokens: int = 0
    stops: tuple[bytes, ...] = ()
    stop_ids: tuple[int, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    bias_ids: tuple[int, ...] = ()
    bias_values: tuple[float, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    logprob_start: int = -1
    """Positions of the prompt from here on get log-probs too; -1: none of the prompt."""
    constraint: Constraint | None = None
    jump_forward: bool = True
    """Whether tokens that the constraint forces are appended without a step for each."""
    heal: bytes = b""
    """Bytes of the prompt's text that the output writes again, before what was asked for. Tokens of
    nothing else are not counted in ``max_new_tokens``; no stop is looked for in these bytes."""


class Submit(_Message, frozen=True, kw_only=True, tag="submit"):
    """Run one request. The prompt is the first ``base_len`` tokens of handle ``base`` (when given),
    then ``ids`` (int32). With ``keep``, the finished sequence, a sampled stop included, stays
    reachable under that handle until `Release`; ``base_len`` of the next request says how much of
    it goes on. An aborted request keeps nothing.

    What the rest of its program, as far as it was sent, still does: ``remaining`` generations and
    selections are to come; ``marks`` says by (handle, length) which prefixes of the prompt will be
    read again. They stay reachable under their handles from now on until `Release`."""

    rid: int
    ids: bytes
    sampling: EngineSampling
    base: int | None = None
    base_len: int = 0
    keep: int | None = None
    namespace: bytes = b""
    program: int = 0
    remaining: int = 0
    marks: tuple[tuple[int, int], ...] = ()
    priority: int = 0
    """Lower goes first, beside the priority of its class ``cls`` (empty: the usual one)."""
    trie: Trie | None = None
    """Continuations of the prompt to be scored, by a request that generates nothing. The log-probs
    of its nodes come as `PromptLogprobs` that count them by their parents: first the nodes after
    the prompt (none of them where the prompt is empty), then those after node 0, 1, ..."""
    cls: str = ""
    explain: bool = False
    """Whether `Finish` is to say where the prompt left what was cached."""
    then: Submit | None = None
    """What goes on where this one ends, unless it is aborted: behind its output, but for what ended
    it, come the ``ids`` of this. `NeedTokens` answers it where a stop string ended inside a token.
    Class, priority, namespace and program are as here."""


class Abort(_Message, frozen=True, kw_only=True, tag="abort_request"):
    rids: list[int]


class Release(_Message, frozen=True, kw_only=True, tag="release"):
    """The handles are no longer needed. Unknown ones are ignored."""

    handles: list[int]


class Credit(_Message, frozen=True, kw_only=True, tag="credit"):
    """The engine may send this many more `StepOut` messages; without credit it merges them."""

    steps: int


class Ask(_Message, frozen=True, kw_only=True, tag="ask"):
    """Answered by `Answer`. Also opens a connection: the first `Ask` of op ``hello``.

    ``explain`` asks where ``ids`` (int32) leaves what is cached, and with ``everywhere`` also who
    of the other namespaces has most of it; answered by an `Explained`. ``tree`` asks for ``limit``
    nodes after the one at the path ``after``; answered by a `TreePage`."""

    id: int
    op: Literal["hello", "flush", "info", "shutdown", "explain", "tree"]
    ids: bytes = b""
    namespace: bytes = b""
    everywhere: bool = False
    after: tuple[int, ...] = ()
    limit: int = 0


EngineMessage = Submit | Abort | Release | Credit | Ask

# --- engine → gateway -----------------------------------------------------------------------------


class Divergence(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a prompt leaves what is cached: its first ``index`` tokens are there. ``reason``: the
    cached paths go on with other tokens (differs), or do not go on (ends); all of the prompt is
    there (whole); nothing is cached (empty), or ever (off).

    ``neighbour`` are the next tokens of the cached path that is most like the rest of the prompt,
    one of ``branches`` ways on, found by ``hits`` requests before."""

    index: int
    reason: Literal["differs", "ends", "whole", "empty", "off"]
    neighbour: tuple[int, ...] = ()
    branches: int = 0
    hits: int = 0


class Explained(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``other``, of the namespace ``namespace``, has more than none of the prompt too."""

    here: Divergence
    other: Divergence | None = None
    namespace: bytes = b""


class TreeNode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An edge of ``size`` tokens, the first of which are ``head``, ``start`` tokens from the
    beginning of its namespace. ``locks``: requests that read it now; ``pins``: those that wish it
    to stay; ``hits``: how often it was found. ``parent`` is ``None`` below a root."""

    id: int
    namespace: bytes
    start: int
    size: int
    children: int
    hits: int
    locks: int
    pins: int
    head: tuple[int, ...]
    parent: int | None = None


class TreePage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Nodes, parents before children. ``next`` is the path to ask on from, if there is more."""

    nodes: list[TreeNode]
    next: tuple[int, ...] | None = None


class Finish(_Message, frozen=True, kw_only=True, tag="finish"):
    """How one request ended. ``text_bytes``: how many bytes of the output, those of ``heal`` left
    out, come before the stop string; -1 when none matched. ``prompt_tokens`` and ``cached_tokens``
    are final, as is how many tokens of the output were forced by its constraint, not sampled. The
    times are in seconds: until its grammar was there, in the queue, from there to the first token,
    from there to the end."""

    rid: int
    reason: Literal["stop", "length", "abort"]
    matched: bytes | int | None = None
    text_bytes: int = -1
    prompt_tokens: int = 0
    cached_tokens: int = 0
    forced_tokens: int = 0
    message: str | None = None
    error: ErrorInfo | None = None
    grammar_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    divergence: Divergence | None = None


class TopLogprobs(_Message, frozen=True, kw_only=True, tag="top"):
    """The most likely tokens at one position: ids (int32), log-probs (float32)."""

    ids: bytes
    values: bytes


class PromptLogprobs(_Message, frozen=True, kw_only=True, tag="prompt_logprobs"):
    """Log-probs (float32) of prompt tokens [start, start + n) of a request, in order of position; a
    request's pieces join without gaps. ``top`` has one entry a position when asked."""

    rid: int
    start: int
    values: bytes
    top: list[TopLogprobs] = []


class StepOut(_Message, frozen=True, kw_only=True, tag="step"):
    """All that a step (or several merged ones) made for one connection, in columns: request ids
    (int64), the token each sampled (int32), its log-prob (float32, only if some row asked). A
    request appears as often as it sampled. ``tops`` is keyed by the column's index."""

    rids: bytes
    tokens: bytes
    logprobs: bytes | None = None
    tops: dict[int, TopLogprobs] = {}
    prompts: list[PromptLogprobs] = []
    finished: list[Finish] = []


class NeedTokens(_Message, frozen=True, kw_only=True, tag="need_tokens"):
    """The handle a `Submit` built on is not there (any more): send the whole prompt."""

    rid: int


class Beat(_Message, frozen=True, kw_only=True, tag="beat"):
    """The engine loop is alive; sent to every connection each second, also when idle."""

    step: int
    running: int
    waiting: int


class Answer(_Message, frozen=True, kw_only=True, tag="answer"):
    id: int
    data: dict[str, Any] = {}
    error: ErrorInfo | None = None


EngineReply = StepOut | NeedTokens | Beat | Answer
