"""Compiling with llguidance: JSON schemas, grammars, and what is too large for an automaton."""

from __future__ import annotations

import json
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..protocol.errors import GrammarError
from .checks_grammar import check_gbnf, is_lark
from .doubling import without_doubling
from .lexemes import lark_of, regular_rules, rules_over_lexemes
from .lexers import Growth
from .library_error import explain
from .llguidance_matcher import LLGuidanceGrammar, LLGuidanceMatcher
from .reachable import reachable_tree
from .regex_tree import portable
from .regular import regular_tree
from .schema_document import Document, pointer
from .schema_lowering import lower_schema, open_names
from .schema_patterns import lower_pattern
from .spec import FLEXIBLE_WHITESPACE, Spec
from .vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLParserLimits, LLTokenizer

MAX_BYTES = 256 << 20
"""Most memory that a grammar may take: its requests hold as much again."""
_BASE_BYTES = 1 << 20
_HEADER = 8
_TRIAL_STEPS = 12
_SHORT_ESCAPES = '"\\bfnrt'
_IN_JSON = r'[^"\\\x00-\x1F\x7F]'
_ONE_OF_MANY = (
    "[a-z]",
    "[A-Za-z]",
    "[a-z ]",
    "[A-Za-z ]",
    "[0-9A-Za-z_]",
    r"[ 0-9A-Za-z\u0080-\U0010FFFF]",
    r"[ -!#-\[\]-~]",
    _IN_JSON,
)
_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{one}{{1,10}}" for one in _ONE_OF_MANY),
    _IN_JSON + "{1,30}",
    _IN_JSON + "+",
]
"""Sets of tokens that the library takes as a whole where all their texts may come: walking what is
left takes a third to a half of the time. Its own sets are those of JSON strings alone. One that may
not come is walked, unless some within it may; so all but the outermost are of the same length."""


class LLGuidanceBackend:
    """Earley parser over a lazy lexer. Takes every kind of spec. ``lexers``: how many a grammar may
    come to have; None is as many as are of use."""

    name = "llguidance"

    def __init__(self, lexers: int | None = None) -> None:
        self._lexers = lexers
        self.growth = Growth()
        self._tokenizers: weakref.WeakKeyDictionary[Vocabulary, LLTokenizer] = (
            weakref.WeakKeyDictionary()
        )

    def supports(self, spec: Spec) -> str | None:  # noqa: ARG002
        """It takes all that passed the checks of their own kind."""
        return None

    def try_in_worker(self, spec: Spec, vocabulary: Vocabulary) -> bytes:
        """The library's form of the grammar, after a trial run over its first tokens."""
        before = _resident()
        source = source_of(spec, vocabulary)
        try:
            grammar = self._build(source, vocabulary, 0)
        except GrammarError as error:
            if spec.kind == "json_schema" and (found := _bad_pattern(spec.text)):
                pattern, where = found
                raise GrammarError(f"not a pattern: {pattern!r}", where=where) from None
            if error.message.startswith("oneOf"):  # its words are about settings of its own
                raise GrammarError(
                    "'oneOf' is not supported where its options may hold together",
                    where=_one_of(lower_schema(spec.text)),
                ) from None
            raise
        _try(grammar.matcher(), vocabulary)
        grown = max(_resident() - before, 0)
        if grown > MAX_BYTES:
            raise GrammarError(f"the {spec.kind} is too complex: it takes {grown >> 20} MiB")
        return grown.to_bytes(_HEADER, "little") + source.encode()

    def finish(self, spec: Spec, vocabulary: Vocabulary, data: bytes) -> LLGuidanceGrammar:  # noqa: ARG002
        size = _BASE_BYTES + int.from_bytes(data[:_HEADER], "little")
        return self._build(data[_HEADER:].decode(), vocabulary, size)

    def compile(self, spec: Spec, vocabulary: Vocabulary) -> LLGuidanceGrammar:
        return self.finish(spec, vocabulary, self.try_in_worker(spec, vocabulary))

    def _build(self, source: str, vocabulary: Vocabulary, nbytes: int) -> LLGuidanceGrammar:
        from llguidance import LLMatcher

        tokenizer, limits = self._tokenizer(vocabulary), _limits()
        return LLGuidanceGrammar(
            lambda: LLMatcher(tokenizer, source, log_level=0, limits=limits),
            vocabulary,
            nbytes,
            self.growth,
            self._lexers,
        )

    def _tokenizer(self, vocabulary: Vocabulary) -> LLTokenizer:
        found = self._tokenizers.get(vocabulary)
        if found is None:
            found = self._tokenizers[vocabulary] = _tokenizer_of(vocabulary)
        return found


class _Tokens:
    """What llguidance asks of a tokenizer: the table, and ids of UTF-8."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = list(vocabulary.tokens)
        self.bos_token_id = None
        self.special_token_ids: list[int] = []
        if vocabulary.eos_ids:
            self.eos_token_id = vocabulary.eos_ids[0]
        else:  # the library cannot do without one
            self.eos_token_id = len(self.tokens)
            self.tokens.append(b"")
        # The library keeps this object as long as the vocabulary lives, not the other way round.
        self._vocabulary = weakref.ref(vocabulary)

    def __call__(self, text: bytes | str) -> list[int]:
        vocabulary = self._vocabulary()
        if vocabulary is None:
            return []
        try:
            return vocabulary.encode(text.encode() if isinstance(text, str) else text)
        except GrammarError:  # bytes that no token begins with: the mask shows that they are dead
            return []


def _tokenizer_of(vocabulary: Vocabulary) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    tokens = _Tokens(vocabulary)
    return LLTokenizer(
        TokenizerWrapper(tokens),
        n_vocab=len(tokens.tokens),
        eos_token=list(vocabulary.eos_ids) or [tokens.eos_token_id],
        slices=_SLICES,
    )


def _resident() -> int:
    """Bytes of this process's own that are in memory; 0 where the system does not say."""
    try:
        _, pages, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    except (OSError, ValueError):
        return 0
    # Pages of files come anew after a fork, whatever was computed.
    return (pages - shared) * os.sysconf("SC_PAGE_SIZE")


def _limits() -> LLParserLimits:
    """Bounds for one step as for the start: a step beyond them fails its own request."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=2_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=500_000,
        step_max_items=100_000,
        max_lexer_states=50_000,
        max_grammar_size=500_000,
        verbose_errors=False,
    )


def source_of(spec: Spec, vocabulary: Vocabulary) -> str:
    """The library's own form of a spec. Raises `GrammarError`."""
    from llguidance import LLMatcher

    if spec.kind == "json_schema":
        return _behind(spec.prefix, _schema_source(spec))
    if regular_tree(spec) is None:
        return _behind(spec.prefix, _grammar_source(spec.text))
    # Spelled as for every backend, so that all read the same language.
    return LLMatcher.grammar_from_regex(portable(reachable_tree(spec, vocabulary)))


def _behind(prefix: str, source: str) -> str:
    """The grammar after a fixed text. A grammar of its own, so that its rules, its options and what
    it ignores (in Lark) stay its own."""
    if not prefix:
        return source
    inner = json.loads(source)["grammars"] if source.startswith("{") else [{"lark_grammar": source}]
    first = {"name": "whole", "lark_grammar": f"start: {json.dumps(prefix)} @value"}
    return json.dumps({"grammars": [first, {**inner[0], "name": "value"}, *inner[1:]]})


def _grammar_source(text: str) -> str:
    from llguidance import LLMatcher

    if is_lark(text):
        return LLMatcher.grammar_from_lark(text)
    rules = without_doubling(check_gbnf(text))
    nodes = rules_over_lexemes(rules, regular_rules(rules))
    return LLMatcher.grammar_from_lark(lark_of(nodes))


def _schema_source(spec: Spec) -> str:
    from llguidance import LLMatcher

    schema = lower_schema(spec.text)
    compact = spec.whitespace == "compact"
    options: dict[str, Any] = {
        "item_separator": ",",
        "key_separator": ":",
        "whitespace_flexible": not compact,
        "coerce_one_of": False,
        "lenient": False,
        "json_allow_general_unicode_escapes": True,
    }
    if open_names(schema):  # or "\\u0061" would pass for a name that is not "a"
        options["json_allow_general_unicode_escapes"] = False
        options["json_allowed_escapes"] = _SHORT_ESCAPES
    if not compact:
        options["whitespace_pattern"] = FLEXIBLE_WHITESPACE
    try:
        return LLMatcher.grammar_from_json_schema(
            schema,
            overrides=options,  # type: ignore[arg-type]
        )
    except ValueError as error:
        raise GrammarError(*explain(str(error))) from None


def _one_of(schema: str) -> str | None:
    nodes = Document(json.loads(schema)).reachable()
    places = [n.path for n in nodes if isinstance(n.schema, dict) and "oneOf" in n.schema]
    return pointer(min(places, key=len), "oneOf") if places else None


def _bad_pattern(schema: str) -> tuple[str, str] | None:
    """(text, place) of a pattern that the library does not read."""
    from llguidance import LLMatcher

    for node in Document(json.loads(schema)).reachable():
        if not isinstance(node.schema, dict):
            continue
        found = [("pattern", node.schema["pattern"])] if "pattern" in node.schema else []
        found += [("patternProperties", name) for name in node.schema.get("patternProperties", ())]
        for keyword, pattern in found:
            names = (keyword,) if keyword == "pattern" else (keyword, pattern)
            where = pointer(node.path, *names)
            regex = LLMatcher.grammar_from_regex(lower_pattern(pattern, where))
            if LLMatcher.validate_grammar(regex):
                return pattern if len(pattern) <= 80 else pattern[:79] + "…", where
    return None


def _try(matcher: LLGuidanceMatcher, vocabulary: Vocabulary) -> None:
    """Take a few tokens, a different one each time: many a limit shows only then."""
    import numpy as np

    row = np.zeros(vocabulary.words, np.int32)
    for step in range(_TRIAL_STEPS):
        if matcher.is_done():
            return
        matcher.fill(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        texts = allowed[~np.isin(allowed, vocabulary.eos_ids)]
        if not len(texts):
            if matcher.can_end():
                return
            raise GrammarError("no output can match it, or none that this vocabulary can write")
        if not matcher.accept(int(texts[(step * 7919) % len(texts)])):
            raise GrammarError("the grammar refuses what it allows: it is too complex")
