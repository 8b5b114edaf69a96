"""Files in a request: workspace path → content in base64.

A path names a place below the workspace and nothing else; the sandbox checks again when it writes.
"""

import base64
import binascii
from collections.abc import Mapping
from typing import Annotated, cast

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, WithJsonSchema

MAX_FILES = 64
MAX_PATH_BYTES = 1024
MAX_NAME_BYTES = 255
MAX_PATH_DEPTH = 16


def _decoded(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError("not base64; send the file's bytes as standard base64") from error


def _encoded(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _relative(path: str) -> str:
    """A path below the workspace: relative, no `.` or `..`, nothing unprintable, not too long."""
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise ValueError("must be a relative path without empty, '.' or '..' parts")
    if "\\" in path or not path.isprintable():
        raise ValueError("must not hold backslashes or unprintable characters")
    longest = max(len(part.encode()) for part in parts)
    if len(path.encode()) > MAX_PATH_BYTES or longest > MAX_NAME_BYTES:
        raise ValueError(f"must have at most {MAX_PATH_BYTES} bytes, {MAX_NAME_BYTES} in each part")
    if len(parts) > MAX_PATH_DEPTH:
        raise ValueError(f"must be at most {MAX_PATH_DEPTH} folders deep")
    return path


def _few_enough(files: object) -> object:
    """Before any entry is looked at: what is wrong with 200,000 of them is that they are many."""
    count = len(cast("Mapping[object, object]", files)) if isinstance(files, Mapping) else 0
    if count > MAX_FILES:
        raise ValueError(f"{count} files; at most {MAX_FILES}")
    return files


def _no_file_is_a_folder(files: dict[str, bytes]) -> dict[str, bytes]:
    for path in files:
        above = path.split("/")[:-1]
        for depth in range(1, len(above) + 1):
            if (folder := "/".join(above[:depth])) in files:
                raise ValueError(f"{folder!r} is both a file and the folder of {path!r}")
    return files


Base64Bytes = Annotated[
    bytes,
    BeforeValidator(_decoded),
    PlainSerializer(_encoded, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "contentEncoding": "base64"}),
]
FilePath = Annotated[str, AfterValidator(_relative)]
Files = Annotated[
    dict[FilePath, Base64Bytes],
    Field(max_length=MAX_FILES),
    AfterValidator(_no_file_is_a_folder),
    BeforeValidator(_few_enough),
]
