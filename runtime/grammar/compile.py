"""`compile_spec`: from a spec to its grammar in one call."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from .checks import check_spec
from .compiler import Compiler
from .matcher import Grammar
from .spec import Spec, Whitespace
from .vocabulary import Vocabulary

if TYPE_CHECKING:
    from ..gateway.tokenizer import Tokenizer

MAX_COMPILERS = 4

_lock = threading.Lock()
_compilers: OrderedDict[tuple[int, str], tuple[Tokenizer, Compiler]] = OrderedDict()


def compile_spec(
    kind: str,
    spec: Any,
    tokenizer: Tokenizer,
    *,
    backend: str = "auto",
    deadline: float = 10.0,
    whitespace: Whitespace = "compact",
) -> Grammar:
    """Compile a ``regex``, ``json_schema`` (text, dict), ``ebnf`` (GBNF, Lark) or ``choice`` (JSON
    text, list) for a tokenizer. A worker process stays for the
    next call.

    Raises `GrammarError` for a spec that is wrong, not supported, or not compiled in ``deadline``
    seconds; `BadInputError` for an unknown backend.
    """
    whole = Spec.of(kind, spec, whitespace)
    check_spec(whole)
    return _compiler(tokenizer, backend).submit(whole, deadline).result()


def _compiler(tokenizer: Tokenizer, backend: str) -> Compiler:
    """One for each tokenizer; the least recently used are closed."""
    key = (id(tokenizer), backend)
    with _lock:
        if key not in _compilers:
            vocabulary = Vocabulary.from_tokenizer(tokenizer)
            _compilers[key] = (
                tokenizer,
                Compiler(vocabulary, backend, workers=2, background=False),
            )
        _compilers.move_to_end(key)
        if len(_compilers) > MAX_COMPILERS:
            _, (_, old) = _compilers.popitem(last=False)
            old.close()
        return _compilers[key][1]
