"""Workspace paths: what may name a file in a sandbox, checked on the host before anything is sent.

A path is relative, has no `..`, no NUL and no component over 255 bytes. Names are bytes to the
kernel; on the host they are text with undecodable bytes as surrogates (`os.fsencode` reverses it).
"""

import os

from runtime.errors import ToolError
from runtime.sandbox.inside.bounds import MAX_DEPTH, MAX_PATH

MAX_NAME = 255
"""Bytes of one component."""


def problem_with(path: str) -> str | None:
    """Why the path cannot be used, as the end of a sentence, or None."""
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        return "holds characters that cannot be encoded"
    parts = encoded.split(b"/")
    if not path or b"\0" in encoded:
        return "is empty or holds a NUL character"
    if encoded.startswith(b"/"):
        return "is absolute; paths are relative to the workspace"
    if b".." in parts:
        return "contains '..'; paths stay beneath the workspace"
    if len(encoded) > MAX_PATH or max(map(len, parts)) > MAX_NAME or len(parts) > MAX_DEPTH:
        return f"is too long; a name has at most {MAX_NAME} bytes, a path {MAX_DEPTH} names"
    return None


def workspace_path(path: str) -> str:
    """The path without `.` and doubled slashes; `.` for the workspace. Raises ToolError."""
    problem = problem_with(path)
    if problem is not None:
        raise ToolError(f"path {path[:80]!r} {problem}")
    return "/".join(part for part in path.split("/") if part not in ("", ".")) or "."
