"""The training script that SCRIPT names, for context parallelism on CPU ranks: local layers have a core attention with a real
exchange in place of Megatron's, which refuses to run among several context-parallel ranks."""

import os
import runpy
import sys

from megatron.core.models import backends

from tests.instruments.context_attention import ContextAttention

if __name__ == "__main__":
    backends.DotProductAttention = ContextAttention
    sys.argv[0] = os.environ["SCRIPT"]
    runpy.run_path(sys.argv[0], run_name="__main__")
