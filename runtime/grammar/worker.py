"""A process that forks those that try specs: ``python -m ramet.runtime.grammar.worker --memory
BYTES``, with a socket as its standard input.

It holds what takes long to make, a vocabulary in each library's form, so that another is there
within milliseconds, and each may be killed, or run out of memory, with nothing lost. It tries
nobody's specs itself. It ends when the other end of its socket is closed, and the others with it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import resource
import signal
import socket
import sys

from ..child import follow

NICE = 5
"""Where cores are few, the engine goes first."""
_MOST_SPECS, _GROWTH_BYTES = 200, 32 << 20
"""After so many specs, or with so much more memory than at first, another takes over."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="ramet-grammar-worker")
    parser.add_argument("--memory", type=int, required=True, help="most bytes of address space")
    memory = parser.parse_args().memory
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICE)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the tries
    with socket.socket(fileno=os.dup(sys.stdin.fileno())) as control:
        return _serve(control, memory)


def _serve(control: socket.socket, memory: int) -> int:
    from .frames import Hello, Reply, WorkerDied, read_frame, write_frame
    from .routing import BACKENDS
    from .vocabulary import Vocabulary

    try:
        hello = read_frame(control.fileno(), Hello, limit=1 << 30)
        vocabulary = Vocabulary(hello.tokens, size=hello.size, eos_ids=hello.eos_ids)
        write_frame(control.fileno(), Reply())
    except WorkerDied:
        return 0
    trier = _Trier(vocabulary)
    while True:
        wanted, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not wanted:  # the compiler is gone
            return 0
        trier.prepare(BACKENDS[wanted[0]])
        with socket.socket(fileno=descriptors[0]) as line:
            server = os.getpid()
            if os.fork() == 0:
                try:
                    control.close()
                    follow(server)
                    _try_specs(line, trier, memory)
                finally:
                    os._exit(0)


def _try_specs(line: socket.socket, trier: _Trier, memory: int) -> None:
    """Say who we are; then hear what to try and say what came of it, again and again, but not when
    that left much memory behind."""
    from .frames import Born, Job, WorkerDied, read_frame, write_frame
    from .priority import go_last

    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    most = _peak() + _GROWTH_BYTES
    with contextlib.suppress(WorkerDied):
        write_frame(line.fileno(), Born(os.getpid()))
        for left in reversed(range(_MOST_SPECS)):
            job = read_frame(line.fileno(), Job, limit=1 << 30)
            if job.last:
                go_last(0)
            reply = trier.reply(job)
            if not left or _peak() > most:
                reply.leaves = True
            write_frame(line.fileno(), reply)
            if reply.leaves:
                break


def _peak() -> int:
    """Most bytes of memory that this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


class _Trier:
    def __init__(self, vocabulary) -> None:  # type: ignore[no-untyped-def]
        self._vocabulary = vocabulary
        self._backends = {}

    def prepare(self, name: str) -> None:
        """Load a library and give it the vocabulary, by specs that do no harm. What goes wrong goes
        wrong again for who asks, and is said there."""
        if name in self._backends:
            return
        from .checks import check_spec
        from .routing import make_backend
        from .spec import Spec

        self._backends[name] = None
        with contextlib.suppress(Exception):
            self._backends[name] = backend = make_backend(name)
            harmless = Spec("regex", "a"), Spec("choice", '["a"]'), Spec("json_schema", "true")
            for spec in harmless:
                with contextlib.suppress(Exception):
                    if backend.supports(spec) is None:
                        check_spec(spec)
                        backend.try_in_worker(spec, self._vocabulary)
        gc.collect()
        gc.freeze()  # or every try would copy the pages that its collections write to

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
            backend = self._backends.get(job.backend) or make_backend(job.backend)
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
