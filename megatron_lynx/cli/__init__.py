"""The command `megatron-lynx`: reads arguments, calls other packages, prints tables or JSON.

Commands import other packages when they run, so that `--help` does not import torch."""

from megatron_lynx.cli import planning, running  # noqa: F401 (their commands register themselves)
from megatron_lynx.cli.app import app, main

__all__ = ["app", "main"]
