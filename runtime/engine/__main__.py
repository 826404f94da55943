"""The engine process: ``python -m ramet.runtime.engine --config JSON --bind ADDRESS``."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from functools import cache

from ..child import follow_parent, tell_error, tell_ready, tell_stage


def main() -> int:
    follow_parent()
    parser = argparse.ArgumentParser(prog="ramet-engine")
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    parser.add_argument("--bind", required=True, help="address to bind, such as ipc:///…")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        from ..config import EngineConfig

        engine = _assemble(EngineConfig.from_json(args.config), args.bind)
    except Exception as error:
        logging.getLogger(__name__).debug("start-up failed", exc_info=True)
        tell_error(error)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: engine.stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tell_ready(**engine.facts)
    try:
        engine.run()
    except Exception:
        return 1  # the loop has logged it
    return 0


def _assemble(config, address):  # type: ignore[no-untyped-def]
    """Model, memory, scheduler, sockets: put together."""
    tell_stage("importing")
    from ..gateway.logprobs import special_text
    from ..gateway.tokenizer import Tokenizer
    from ..grammar import Compiler, Vocabulary
    from ..grammar.prefix_matcher import PrefixGrammar
    from ..memory.kv_memory import KVMemory
    from ..model.build import PAGE, build_runner, device_of, step_tokens_of
    from ..model.store import resolve
    from ..model.tier_build import build_tiers
    from ..protocol.awake import spin_seconds
    from ..scheduler.classes import parse_classes
    from ..scheduler.limits import MOST_WAITING, MOST_WAITING_TOKENS, Limits
    from ..scheduler.scheduler import Scheduler
    from .connections import Connections
    from .guides import Guides
    from .healing import Prefixes
    from .loop import Engine
    from .recorder import Recorder

    files = resolve(config.model_path)
    runner = build_runner(config, files, tell_stage)
    source = resolve(config.tokenizer_path) if config.tokenizer_path else None
    tokenizer = Tokenizer.from_files(files, source=source)
    memory = KVMemory(
        runner.num_slots - PAGE,
        PAGE,
        eviction=config.radix_eviction_policy,
        caching=not config.disable_radix_cache,
        tiers=build_tiers(config, files, runner.kv, tell_stage),
    )
    limits = Limits(
        max_rows=runner.max_rows,
        context_length=runner.context_length,
        step_tokens=step_tokens_of(config, device_of(config), runner.context_length),
        prompt_sizes=runner.prompt_sizes,
        max_waiting=config.max_queued_requests or MOST_WAITING,
        max_waiting_tokens=config.max_queued_tokens or MOST_WAITING_TOKENS,
        classes=parse_classes(config.priority_classes),
        priority_ageing=config.priority_ageing,
        ageing=config.schedule_ageing,
    )
    scheduler = Scheduler(
        limits,
        memory,
        policy=config.schedule_policy,
        conservativeness=config.schedule_conservativeness,
        sharing=None if config.disable_tree_attention else runner.sharing,
    )

    recorder = config.record_trace and Recorder(
        config.record_trace,
        slots=memory.total,
        eviction=config.radix_eviction_policy,
        policy=config.schedule_policy,
    )

    @cache
    def vocabulary() -> Vocabulary:
        return Vocabulary.from_tokenizer(tokenizer, runner.vocab_size)

    guides = Guides(
        lambda: Compiler(vocabulary(), config.grammar_backend),
        tokenizer.eos_ids,
        special_text(tokenizer),
        Prefixes(lambda: PrefixGrammar(vocabulary())),
    )
    spin = spin_seconds() if runner.asynchronous else 0.0  # on a CPU the model needs every core
    facts = {
        "model": config.model_name,
        "context_length": runner.context_length,
        "vocab_size": runner.vocab_size,
        "page_size": config.page_size,
        "num_slots": memory.total,
        "spin_seconds": spin,
    }
    return Engine(
        runner,
        scheduler,
        Connections(address, memory.tree, spin=spin),
        tokenizer.bytes_table,
        facts,
        guides=guides,
        overlap=not config.disable_overlap_schedule,
        recorder=recorder,
    )


if __name__ == "__main__":
    sys.exit(main())
