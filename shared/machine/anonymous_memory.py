"""Memory of a process's own that is zero without having been written."""

from __future__ import annotations

import mmap


def anonymous_memory(num_bytes: int) -> mmap.mmap:
    """`num_bytes`, more than none: zeros that take memory page by page, once they are touched.

    What malloc gives for zeros is like that only above a size that it raises to whatever was freed last; below that it
    writes them."""
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
