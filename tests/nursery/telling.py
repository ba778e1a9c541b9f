"""Says what it has, and ends with status 3; or stays."""

import json
import os
import sys
import time

if __name__ == "__main__":
    if sys.argv[1:] == ["for ever"]:
        time.sleep(600)
    files = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    found = {
        "arguments": sys.argv[1:],
        "environment": sorted(os.environ),
        "path": sys.path,
        "imported": sorted({"torch", "megatron", "transformer_engine", "apex"} & sys.modules.keys()),
        "threads": os.listdir("/proc/self/task"),
        "files": [file for file in files if not file.startswith("/proc")],
    }
    print(json.dumps(found))
    sys.exit(3)
