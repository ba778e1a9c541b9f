"""`python -m scripts.gpu_check`; use `scripts/gpu_check.sh`, which sets the environment that CUDA and Megatron want."""

from __future__ import annotations

import sys

NEEDED = "torch with CUDA and NCCL, megatron-core, and what `pip install -e . pytest` installs"


def begin() -> int:
    """The exit status of the run; 2, and one message, where a module is not installed."""
    try:
        from scripts.gpu_check.command import main
    except ModuleNotFoundError as missing:
        found = f"{sys.executable}: found no module {missing.name}, needed {NEEDED}"
        print(f"the acceptance run cannot begin\n  - {found}", file=sys.stderr)
        return 2
    return main()


if __name__ == "__main__":
    sys.exit(begin())
