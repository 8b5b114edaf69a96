"""What a workspace can hold, counted alike on both ends: the helper refuses what the host would.

A tmpfs counts whole pages of content and every name (a second hard link as much as a file). A link
with a short target lies in its inode and takes no page.
"""

import os

MAX_PATH = 4_000
"""Bytes of a whole path."""
MAX_DEPTH = 128
"""Components of a path (the helper holds a descriptor for each)."""
PAGE = os.sysconf("SC_PAGE_SIZE")
INLINE = 127
"""Bytes of the longest link target that takes no page."""


def pages(kind: bytes, size: int) -> int:
    """Pages that an entry of this kind (a letter of the wire) and size in bytes takes."""
    if kind == b"f":
        return whole_pages(size)
    return whole_pages(size) if kind == b"l" and size > INLINE else 0


def whole_pages(size: int) -> int:
    """Pages that hold `size` bytes; a tmpfs rounds its own size in the same way."""
    return -(-size // PAGE)
