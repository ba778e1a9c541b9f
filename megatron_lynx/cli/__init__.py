"""The command `megatron-lynx`: reads arguments, calls the packages that do the work, prints tables or JSON.

    arguments ─> one small function ─> its machinery, imported inside ─> stdout: tables, or JSON with --json
    options, inputs, launches   advising, planning, pricing, running, reporting   answers, terminal

Only the command line itself is imported at the top: `--help` must not wait for torch.
"""

from megatron_lynx.cli import advising, planning, pricing, reporting, running  # noqa: F401 (their commands register themselves)
from megatron_lynx.cli.app import app, main

__all__ = ["app", "main"]
