"""What FFmpeg says of files, for clients."""

from __future__ import annotations


def error_text(error: Exception) -> str:
    """What the library says, without the name of a file that has none."""
    said = str(error).partition(": '<none>'")[0]
    return (said.partition("] ")[2] or said or type(error).__name__)[:120]
