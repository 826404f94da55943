"""A process that renders one template and ends: ``python -m … < request > answer``.

What a request's own template asks for may take any time and memory, and nothing inside a process
stops that. So it happens in this one, which the kernel bounds and the server may kill.
"""

from __future__ import annotations

import resource
import sys

CPU_S = 1
MEMORY_BYTES = 512 << 20
MOST_CHARACTERS = 16 << 20


def main() -> int:
    """The answer is JSON: ``{"text": …}`` or ``{"error": …}``."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import msgspec

    from ...protocol.errors import ProgramError
    from ..template import ChatTemplate

    asked = msgspec.json.decode(sys.stdin.buffer.read())
    try:
        template = ChatTemplate(asked["source"], asked["named_tokens"])
        text = template.render(**asked["variables"])
        answer = {"text": text} if len(text) <= MOST_CHARACTERS else {"error": "it writes too much"}
    except ProgramError as error:
        answer = {"error": error.message}
    except (MemoryError, RecursionError, OverflowError) as error:
        answer = {"error": f"the chat template failed: {type(error).__name__}"}
    sys.stdout.buffer.write(msgspec.json.encode(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
