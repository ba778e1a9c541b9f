"""Messages of the launcher go to standard error, where they do not mix with what the script prints."""

from __future__ import annotations

import os
import sys

from megatron_lynx.errors import LynxError


def say(text: str) -> None:
    """Print a line with a single write. `print` makes two, between which another rank's line may come."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def stop(error: LynxError) -> None:
    """Say what is wrong. In the middle of training the process ends here: other ranks may wait for this one in a collective, and
    leaving the job properly would wait for them; torchrun ends them when this process is gone."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    in_job = distributed is not None and distributed.is_initialized()
    if in_job or os.environ.get("LOCAL_RANK", "0") == "0":
        rank = f"rank {os.environ.get('RANK', '0')}: " if in_job else ""
        say(f"megatron-lynx: {rank}{error}")
    if in_job:
        sys.stdout.flush()
        os._exit(error.exit_status)
