"""`-m tests.launch.without_launcher SCRIPT ...`: the script without a GPU, and with no hooks but those that it holds itself."""

import os
import runpy
import sys
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"

from tests.instruments.script_device import stand_in_for_gpu_machine

if __name__ == "__main__":
    stand_in_for_gpu_machine()
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
