"""Makes a model directory of a GGUF file: `python -m services.worker.models.gguf FILE FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

from services.worker.models.config import ModelError
from services.worker.models.gguf.conversion import convert


def main() -> None:
    """Exits with 1 and one line that says what is wrong."""
    source, folder = (Path(each) for each in sys.argv[1:])
    try:
        numbers = convert(source, folder)
    except ModelError as error:
        sys.exit(str(error))
    if numbers:
        print(f"{source}: matrices of {', '.join(sorted(numbers))} become bfloat16, 16 bits a weight")


if __name__ == "__main__":
    main()
