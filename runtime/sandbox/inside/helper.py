"""The helper: process 1 of a sandbox. Answers the host's requests one by one until it hangs up.

It speaks `wire` frames over the descriptors it was started with, keeps them out of reach of every
command, and makes itself undumpable, so that a command of the same uid can neither trace it nor
open its pipes through `/proc/1`. It handles no signal: process 1 gets from inside only those that
it handles (and Python would have it handle SIGINT). When the host closes its end, or dies, it kills
everything and exits; as process 1 it takes the whole process namespace with it.
"""

import os
import sys
from collections.abc import Iterator
from itertools import islice

from .commands import (
    PR_SET_DUMPABLE,
    SIGINT,
    Command,
    Outcome,
    Rules,
    Running,
    leave,
    libc,
)
from .files import (
    FOLDER,
    Entry,
    Incoming,
    Refused,
    check_restorable,
    link_target,
    read_chunks,
    shown,
    split,
    walk,
)
from .wire import number, pack, seconds, unpack

WORKSPACE = b"/workspace"
ENTRIES_PER_FRAME = 200


class Helper:
    """One sandbox's helper: `requests` and `replies` are descriptors of the host's pipes."""

    def __init__(self, requests: int, replies: int, rules: Rules) -> None:
        self._requests = requests
        self._replies = replies
        self._rules = rules
        self._root = os.open(WORKSPACE, FOLDER)
        self._incoming = Incoming(self._root)

    def serve(self) -> None:
        """Never returns."""
        self._reply(b"ready")
        while True:
            request = self._receive()
            os.fchmod(self._root, 0o755)
            try:
                self._answer(request[0], request[1:])
            except Refused as refused:
                self._reply(b"refused", str(refused).encode("utf-8", "replace"))
            except Exception as error:
                self._reply(b"failed", repr(error).encode("utf-8", "replace"))
                leave()

    def _answer(self, verb: bytes, arguments: list[bytes]) -> None:
        if verb == b"exec":
            self._exec(arguments)
        elif verb == b"read":
            self._read(arguments[0], int(arguments[1]))
        elif verb == b"list":
            self._list(arguments[0], int(arguments[1]))
        elif verb == b"store":
            last, mode, kind, path, chunk = arguments
            self._incoming.add(last == b"1", int(mode), kind, path, chunk)
        elif verb == b"settle":
            self._incoming.settle()
            self._reply(b"stored")
        elif verb == b"dump":
            self._dump(int(arguments[0]), int(arguments[1]))
        else:
            raise ValueError(f"unknown request {verb!r}")

    # ------------------------------------------------------------ requests

    def _exec(self, arguments: list[bytes]) -> None:
        timeout, folder, stdin, count, *words = arguments
        argv, variables = words[: int(count)], words[int(count) :]
        path = b"/".join([WORKSPACE, *split(folder)])
        if not os.path.isdir(path):
            raise Refused(f"cannot run in {shown(folder)}: it is not a folder of the workspace")
        environment = dict(variable.split(b"=", 1) for variable in variables)
        command = Command(argv, environment, path, stdin, int(timeout) / 1_000_000)
        self._report(Running(command, self._rules, self._requests).finish())

    def _report(self, outcome: Outcome) -> None:
        status = outcome.status or 0
        self._reply(
            b"done",
            number(os.waitstatus_to_exitcode(status)),
            number(outcome.timed_out),
            number(outcome.out_of_memory),
            number(outcome.truncated),
            seconds(outcome.wall),
            seconds(outcome.cpu),
            number(outcome.peak),
            outcome.stdout,
            outcome.stderr,
        )

    def _read(self, path: bytes, limit: int) -> None:
        for chunk in read_chunks(self._root, path, limit):
            self._reply(b"data", chunk)
        self._reply(b"end")

    def _list(self, path: bytes, limit: int) -> None:
        entries = islice(walk(self._root, path), limit)
        while page := list(islice(entries, ENTRIES_PER_FRAME)):
            self._reply(b"entries", *(field for entry in page for field in fields_of(entry)))
        self._reply(b"end")

    def _dump(self, disk_pages: int, most: int) -> None:
        check_restorable(self._tree(), disk_pages, most)
        for entry in self._tree():
            kind, _, size, path = entry
            target = link_target(self._root, path) if kind == b"l" else b""
            self._reply(b"entry", *fields_of(entry), target)
            if kind == b"f":
                for chunk in read_chunks(self._root, path, size):
                    self._reply(b"data", chunk)
        self._reply(b"end")

    def _tree(self) -> Iterator[Entry]:
        """What a snapshot keeps of the workspace."""
        return (entry for entry in walk(self._root, b"") if entry[0] != b"o")

    # ------------------------------------------------------------ frames

    def _receive(self) -> list[bytes]:
        return unpack(self._read_exactly(int.from_bytes(self._read_exactly(4), "big")))

    def _read_exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            piece = os.read(self._requests, min(count - len(data), 1 << 16))
            if not piece:
                leave()
            data += piece
        return bytes(data)

    def _reply(self, *fields: bytes) -> None:
        view = memoryview(pack(fields))
        while view:
            view = view[os.write(self._replies, view) :]


def fields_of(entry: Entry) -> tuple[bytes, bytes, bytes, bytes]:
    kind, mode, size, path = entry
    return kind, number(mode), number(size), path


def hide_descriptors(proc: int) -> tuple[int, int]:
    """The host's pipes and its /proc, where no command inherits them; 0 and 1 become /dev/null."""
    os.closerange(3, proc)
    os.closerange(proc + 1, 1 << 12)
    os.set_inheritable(proc, False)
    requests, replies = os.dup(0), os.dup(1)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    return requests, replies


def main(arguments: list[str]) -> None:
    """`arguments` are the fields of `Rules`, in order."""
    rules = Rules(*map(int, arguments))
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.signal(SIGINT, None)
    os.umask(0o022)
    requests, replies = hide_descriptors(rules.proc)
    Helper(requests, replies, rules).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
