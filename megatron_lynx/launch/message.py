from __future__ import annotations

import os
import sys

from megatron_lynx.errors import LynxError


def say(text: str) -> None:
    """Print a line with a single write. `print` makes two, and another rank's line may come between them."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def stop(error: LynxError) -> None:
    """Print an error, and in a distributed job exit at once: a normal exit would wait for ranks that may wait in a collective."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    in_job = distributed is not None and distributed.is_initialized()
    if in_job or os.environ.get("LOCAL_RANK", "0") == "0":
        rank = f"rank {os.environ.get('RANK', '0')}: " if in_job else ""
        say(f"megatron-lynx: {rank}{error}")
    if in_job:
        sys.stdout.flush()
        os._exit(error.exit_status)
