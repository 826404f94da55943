"""A process that tries specs: ``python -m ramet.runtime.grammar.worker --memory BYTES``.

It may be killed at any moment and may run out of memory; nothing else is harmed by that.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys

from ..child import follow_parent

NICE = 5
"""Where cores are few, the engine goes first."""


def main() -> int:
    follow_parent()
    parser = argparse.ArgumentParser(prog="ramet-grammar-worker")
    parser.add_argument("--memory", type=int, required=True, help="most bytes of address space")
    memory = parser.parse_args().memory
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICE)
    replies = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no reply
    return _serve(sys.stdin.fileno(), replies)


def _serve(jobs: int, replies: int) -> int:
    from .frames import Hello, Job, Reply, WorkerDied, read_frame, write_frame
    from .vocabulary import Vocabulary

    try:
        hello = read_frame(jobs, Hello, limit=1 << 30)
        vocabulary = Vocabulary(hello.tokens, size=hello.size, eos_ids=hello.eos_ids)
        write_frame(replies, Reply())
        trier = _Trier(vocabulary)
        while True:
            write_frame(replies, trier.reply(read_frame(jobs, Job, limit=1 << 30)))
    except WorkerDied:  # the compiler is gone
        return 0


class _Trier:
    def __init__(self, vocabulary) -> None:  # type: ignore[no-untyped-def]
        self._vocabulary = vocabulary
        self._backends = {}

    def reply(self, job):  # type: ignore[no-untyped-def]
        """Check the spec, then try it. Whatever goes wrong is said, never raised."""
        from ..protocol.errors import ErrorInfo, GrammarError
        from .backend import Refused
        from .checks import check_spec
        from .frames import Reply
        from .routing import make_backend

        spec = job.spec()
        try:
            check_spec(spec)
            backend = self._backends.get(job.backend)
            if backend is None:
                backend = self._backends[job.backend] = make_backend(job.backend)
            reason = backend.supports(spec)
            if reason is not None:
                return Reply(refused=reason)
            return Reply(data=backend.try_in_worker(spec, self._vocabulary))
        except Refused as refusal:
            return Reply(refused=str(refusal))
        except ImportError as error:
            return Reply(refused=f"{job.backend} is not installed ({error.name})")
        except MemoryError:
            return Reply(error=ErrorInfo.of(GrammarError("the grammar needs too much memory")))
        except RecursionError:
            return Reply(error=ErrorInfo.of(GrammarError("the grammar is nested too deep")))
        except Exception as error:
            return Reply(error=ErrorInfo.of(error))


if __name__ == "__main__":
    sys.exit(main())
