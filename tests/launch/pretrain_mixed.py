"""The training script that SCRIPT names, for hybrid models on CPU ranks, with stand-ins for the kernels of gated delta nets."""

import os
import runpy
import sys

from tests.transparency.opaque_layers import delta_kernels

if __name__ == "__main__":
    sys.argv[0] = os.environ["SCRIPT"]
    with delta_kernels():
        runpy.run_path(sys.argv[0], run_name="__main__")
