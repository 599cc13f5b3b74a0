"""On the PYTHONPATH of a stack under test: a rank's device hangs once when the file $HANG_WHEN_THERE is there.

Python imports this at its start, long before the model's classes exist; a finder wraps them when they are imported.
"""

from __future__ import annotations

import os
import time
from typing import Any

from tests.support.imported_modules import change_when_imported

DECODER = "services.worker.models.native_decoder"


def hang_when_there(forward: Any) -> Any:
    def hanging(*arguments: Any, **keywords: Any) -> Any:
        try:
            os.unlink(os.environ["HANG_WHEN_THERE"])
        except FileNotFoundError:
            return forward(*arguments, **keywords)
        while True:
            time.sleep(3600)

    return hanging


def hang(module: Any) -> None:
    for name in ("forward", "decode"):
        setattr(module.NativeDecoder, name, hang_when_there(getattr(module.NativeDecoder, name)))


if "HANG_WHEN_THERE" in os.environ:
    change_when_imported({DECODER: hang})
