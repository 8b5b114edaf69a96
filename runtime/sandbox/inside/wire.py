"""Frames between the host and the helper inside a sandbox.

A frame is a 4-byte big-endian length and that many bytes; its payload is a list of byte strings,
each with a 4-byte length of its own. There are no types, no nesting and no names on the wire, so a
hostile peer can send wrong bytes but never an object. The host refuses a frame longer than it
expects before it reads it.

    request                                       replies
    exec  timeout cwd stdin argc argv… env…       done exit signal timed_out out_of_memory truncated
                                                  wall cpu peak stdout stderr
    read  path limit                              data chunk …, end
    list  path limit                              entries (kind mode size path)…, end
    store last mode kind path chunk               none: its failure is told by `settle`
    settle                                        stored, or the first refusal of a `store` before
    dump  pages entries                           entry kind mode size path target, data …, end

Nothing is sent back while entries are stored, so a host that sends a whole tree before it reads can
never find the helper waiting for it.

Any request may be answered by `refused reason` (the agent's fault, in words it can act on) or
`failed reason` (the helper's own; it ends then).
"""

from collections.abc import Iterable

CHUNK = 1 << 18
"""Bytes of file content per frame."""
OVERHEAD = 1 << 14
"""Room for a frame's other fields: two paths and some numbers."""


class WireError(Exception):
    """Bytes that are not a frame."""


def pack(fields: Iterable[bytes]) -> bytes:
    """One frame, its length included."""
    payload = b"".join(len(field).to_bytes(4, "big") + field for field in fields)
    return len(payload).to_bytes(4, "big") + payload


def unpack(payload: bytes) -> list[bytes]:
    """The fields of a payload; at least one. Raises WireError where lengths do not add up."""
    fields: list[bytes] = []
    at = 0
    while at < len(payload):
        start = at + 4
        end = start + int.from_bytes(payload[at:start], "big")
        if start > len(payload) or end > len(payload):
            raise WireError(f"field {len(fields)} ends at byte {end} of {len(payload)}")
        fields.append(payload[start:end])
        at = end
    if not fields:
        raise WireError("empty frame")
    return fields


def number(value: int) -> bytes:
    return str(int(value)).encode()


def seconds(value: float) -> bytes:
    """Seconds as whole microseconds."""
    return number(round(value * 1_000_000))
