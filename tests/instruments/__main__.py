"""`python -m tests.instruments SCRIPT ...`: the launcher, on a machine without a GPU. Needs a checkout on the import path.

torchrun --nproc-per-node 4 -m tests.instruments pretrain_gpt.py --lynx-plan plan.yaml --distributed-backend gloo ...
"""

from __future__ import annotations

import os
import sys

# Decided when torch and Megatron are imported: some functions are compiled at import.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

from megatron_lynx.errors import ConfigError
from megatron_lynx.launch.script import main, say
from tests.instruments.script_device import stand_in_for_gpu_machine


def run() -> int:
    try:
        stand_in_for_gpu_machine()
    except ConfigError as error:
        say(f"megatron-lynx: {error}")
        return error.exit_status
    return main(sys.argv[1:], module="tests.instruments")


if __name__ == "__main__":
    sys.exit(run())
