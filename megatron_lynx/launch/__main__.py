"""`python -m megatron_lynx.launch SCRIPT ...`"""

from __future__ import annotations

import sys

from megatron_lynx.launch.script import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
