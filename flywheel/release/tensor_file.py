"""A safetensors file, judged by its header alone, before anything trusts its contents.

The format is eight bytes of header length, a JSON header, and the tensors' bytes without a gap.
Sizes are bounded before they are read, and the header must account for every byte, so that a
truncated, padded or overlapping file is refused with its own reason. No tensor library is needed:
values are looked at as bit patterns, in blocks, for NaN and infinity.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from runtime.errors import AdapterRefused

MAX_HEADER_BYTES = 4 << 20
"""More than a thousand layers need."""
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}
_EXPONENTS = {"F32": ("<u4", 0x7F80_0000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
"""Dtype → the integers it is read as, and the bits that are all set in NaN and infinity."""
_BLOCK = 1 << 22
"""Values looked at in one go."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Offset of the first byte in the file."""
    end: int


class _Raw(BaseModel):
    model_config = ConfigDict(extra="forbid")

    dtype: str
    shape: list[Annotated[int, Field(ge=0, strict=True)]] = Field(max_length=8)
    data_offsets: tuple[
        Annotated[int, Field(ge=0, strict=True)], Annotated[int, Field(ge=0, strict=True)]
    ]


def read_entries(path: Path) -> dict[str, TensorEntry]:
    """The tensors a file holds, by name. Raises AdapterRefused saying what is wrong with it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = _header_length(path, file, size)
        header = _parsed(path, file.read(length))
    start = 8 + length
    entries = {name: _entry(path, name, raw, start) for name, raw in header.items()}
    _demand_gapless(path, entries, start, size)
    return entries


def first_not_finite(path: Path, entries: Mapping[str, TensorEntry]) -> str | None:
    """The name of the first tensor (of dtype F32, F16 or BF16) that holds NaN or infinity."""
    for name, entry in entries.items():
        kind, exponent = _EXPONENTS[entry.dtype]
        if entry.start == entry.end:
            continue
        bits = np.memmap(
            path, kind, "r", entry.start, ((entry.end - entry.start) // np.dtype(kind).itemsize,)
        )
        for at in range(0, len(bits), _BLOCK):
            if ((bits[at : at + _BLOCK] & exponent) == exponent).any():
                return name
    return None


# ---------------------------------------------------------------- the header


def _header_length(path: Path, file: BinaryIO, size: int) -> int:
    head = file.read(8)
    if head.startswith((b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        raise AdapterRefused(f"{path.name} is a pickle, not safetensors", reason="pickle")
    length = int.from_bytes(head, "little")
    if length > MAX_HEADER_BYTES:
        raise AdapterRefused(
            f"{path.name} has a header of {length} bytes; at most {MAX_HEADER_BYTES} are read",
            reason="huge_header",
        )
    if len(head) < 8 or length > size - 8:
        raise AdapterRefused(
            f"{path.name} ends within its header: {size} bytes in all", reason="truncated"
        )
    return length


def _parsed(path: Path, content: bytes) -> dict[str, _Raw]:
    try:
        header = json.loads(content, object_pairs_hook=_unique)
        if not isinstance(header, dict):
            raise ValueError("not an object")
        header.pop("__metadata__", None)
        return {name: _Raw.model_validate(raw) for name, raw in header.items()}
    except (ValueError, RecursionError) as error:
        what = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise AdapterRefused(
            f"{path.name} has a header that cannot be read: {what}", reason="invalid_header"
        ) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found


def _entry(path: Path, name: str, raw: _Raw, start: int) -> TensorEntry:
    first, last = raw.data_offsets
    item = _ITEM_BYTES.get(raw.dtype)
    if item is None or last - first != math.prod(raw.shape) * item:
        raise AdapterRefused(
            f"{path.name}: {name} claims {raw.dtype} {raw.shape} in {last - first} bytes",
            reason="invalid_header",
        )
    return TensorEntry(raw.dtype, tuple(raw.shape), start + first, start + last)


def _demand_gapless(path: Path, entries: Mapping[str, TensorEntry], start: int, size: int) -> None:
    at = start
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.end)):
        if entry.start != at:
            raise AdapterRefused(
                f"{path.name}: its tensors overlap or leave a gap at byte {at}",
                reason="invalid_header",
            )
        at = entry.end
    if at != size:
        raise AdapterRefused(
            f"{path.name} has {size} bytes where its header accounts for {at}", reason="truncated"
        )
