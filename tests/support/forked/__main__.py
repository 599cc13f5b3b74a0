"""Prints what it was started with, and ends as it was told."""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
import time

print(json.dumps({"argv": sys.argv[1:], "said": os.environ.get("SAID"), "name": __name__}), flush=True)
atexit.register(lambda: print(f"{gc.get_freeze_count()} objects are never freed", flush=True))
match sys.argv[1]:
    case "exit":
        sys.exit(3)
    case "raise":
        raise RuntimeError("a bug of the program")
    case "sleep":
        time.sleep(600)
