"""The command `megatron-lynx`. What each command does is elsewhere; here is how it is asked and how it answers.

    arguments ─> one small function ─> its machinery, imported inside ─> stdout: tables, or JSON with --json
    options, inputs   planning, pricing, running                         answers, terminal

No import at the top but the command line's own: `--help` must not wait for torch.
"""

from megatron_lynx.cli import planning, pricing, running  # noqa: F401 (their commands register themselves)
from megatron_lynx.cli.app import app, main

__all__ = ["app", "main"]
