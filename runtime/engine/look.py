"""Questions about the radix tree: read, bounded, never waited for. And its emptying."""

from __future__ import annotations

from typing import Any

import msgspec

from ..memory import tree_view
from ..memory.kv_memory import KVMemory
from ..protocol.errors import BackendError, BadInputError, ErrorInfo
from ..protocol.messages import Ask, Explained, TreePage
from ..scheduler.request import make_tokens

MOST_NODES = 1000
MOST_TOKENS = 1 << 21


def look(memory: KVMemory, ask: Ask) -> tuple[dict[str, Any], ErrorInfo | None]:
    """The answer to an `Ask` of op ``explain`` or ``tree``, or what was wrong with it."""
    try:
        found = _explained(memory, ask) if ask.op == "explain" else _page(memory, ask)
    except BadInputError as error:
        return {}, ErrorInfo.of(error)
    # Namespaces are bytes, which msgpack carries as they are.
    return msgspec.to_builtins(found, builtin_types=(bytes,)), None


def emptied(memory: KVMemory) -> tuple[dict[str, Any], ErrorInfo | None]:
    """How many slots a flush has freed, or why something is left."""
    try:
        return {"freed": memory.flush()}, None
    except BackendError as error:
        return {}, ErrorInfo.of(error)


def _explained(memory: KVMemory, ask: Ask) -> Explained:
    if len(ask.ids) > 4 * MOST_TOKENS:
        raise BadInputError(f"at most {MOST_TOKENS} tokens can be asked about", param="ids")
    tokens = make_tokens(ask.ids)
    here = memory.explain(tokens, ask.namespace)
    other = None
    if ask.everywhere and memory.caching:
        other = tree_view.elsewhere(memory.tree, tokens, ask.namespace)
    if other is None:
        return Explained(here=here)
    return Explained(here=here, namespace=other[0], other=other[1])


def _page(memory: KVMemory, ask: Ask) -> TreePage:
    if not 1 <= ask.limit <= MOST_NODES:
        raise BadInputError(f"limit must be in [1, {MOST_NODES}], not {ask.limit}", param="limit")
    found = tree_view.page(memory.tree, ask.after, ask.limit)
    return TreePage(nodes=found.nodes, next=found.next)
