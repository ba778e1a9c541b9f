"""A training script that rank 1 runs in another folder, where files given by relative paths are missing."""

import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        os.chdir("/")
    sys.argv[0] = str(Path(__file__).with_name("pretrain_tiny.py"))
    runpy.run_path(sys.argv[0], run_name="__main__")
