"""Snapshots: a workspace as one content-addressed file.

A snapshot is named by the sha256 of a canonical archive: entries sorted by the bytes of their path,
each with type, permission bits and content; no times, owners or extended attributes, so equal trees
have equal ids wherever they were made. Links are kept as links and never followed; FIFOs, sockets
and devices are left out. A file is complete or absent: it is written beside its place, synced,
renamed, and the folder synced. Reading checks the name against the bytes.

Scaling out: names are global and files immutable, so the folder may be a shared one, and an object
store is a second implementation of the same four methods.
"""

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal, Self

from runtime.errors import InputError, SandboxError
from runtime.run import SnapshotId
from runtime.sandbox.paths import problem_with

MAGIC = b"noria-snapshot-1\n"
FILE_MODE = 0o644
FOLDER_MODE = 0o755
PREFIX = "sha256:"
INCOMING = ".incoming-"
STALE_SECONDS = 3_600

EntryKind = Literal["file", "directory", "link"]
LETTERS: dict[EntryKind, bytes] = {"file": b"f", "directory": b"d", "link": b"l"}
KINDS: dict[bytes, EntryKind] = {letter: kind for kind, letter in LETTERS.items()}


@dataclass(frozen=True, slots=True)
class SnapshotEntry:
    """One file, folder or link."""

    path: str
    kind: EntryKind
    mode: int
    """Permission bits, at most 0o777."""
    content: bytes = b""
    """A file's bytes, a link's target; empty for a folder."""

    def header(self) -> bytes:
        path = os.fsencode(self.path)
        sizes = len(path).to_bytes(4, "big") + len(self.content).to_bytes(8, "big")
        return LETTERS[self.kind] + (self.mode & 0o777).to_bytes(2, "big") + sizes + path


HEADER = 1 + 2 + 4 + 8


class SnapshotRefused(Exception):
    """Entries that are no tree: out of order, unsafe names, or larger than allowed."""


# ---------------------------------------------------------------- files as entries


def entries_of_files(files: Mapping[str, bytes]) -> Iterator[SnapshotEntry]:
    """The tree holding just these files, parents included, sorted.

    Raises InputError for a path that is unsafe, given twice, or both a file and a folder.
    """
    contents: dict[bytes, bytes] = {}
    folders: set[bytes] = set()
    for path, content in files.items():
        parts = _parts(path)
        name = b"/".join(parts)
        if name in contents:
            raise InputError(f"file {path!r} is given twice")
        contents[name] = content
        folders.update(b"/".join(parts[:depth]) for depth in range(1, len(parts)))
    clash = min(folders & contents.keys(), default=None)
    if clash is not None:
        raise InputError(f"{os.fsdecode(clash)!r} is given as a file and as a folder")
    for name in sorted(folders | contents.keys()):
        if name in folders:
            yield SnapshotEntry(os.fsdecode(name), "directory", FOLDER_MODE)
        else:
            yield SnapshotEntry(os.fsdecode(name), "file", FILE_MODE, contents[name])


def _parts(path: str) -> list[bytes]:
    problem = problem_with(path)
    parts = [] if problem else [p for p in os.fsencode(path).split(b"/") if p not in (b"", b".")]
    if not parts:
        raise InputError(f"file name {path[:80]!r} {problem or 'names the workspace itself'}")
    return parts


def digest_of_files(files: Mapping[str, bytes]) -> SnapshotId:
    """The id of a fresh workspace holding just these files. Raises InputError as above."""
    digest = hashlib.sha256(MAGIC)
    for entry in entries_of_files(files):
        digest.update(entry.header() + entry.content)
    return SnapshotId(PREFIX + digest.hexdigest())


# ---------------------------------------------------------------- the store


class SnapshotWriter:
    """Collects the entries of one snapshot, in order; `commit` gives it its name and its place.

    Used as a context manager: what was not committed is removed.
    """

    def __init__(self, folder: Path, max_bytes: int, max_entries: int) -> None:
        self._folder = folder
        self._left_bytes = max_bytes
        self._left_entries = max_entries
        self._last = b""
        self._digest = hashlib.sha256(MAGIC)
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=INCOMING)
        self._path = Path(name)
        self._file: BinaryIO = os.fdopen(descriptor, "wb")
        self._file.write(MAGIC)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)

    def add(self, entry: SnapshotEntry) -> None:
        """Raises SnapshotRefused for an unsafe or misplaced name, or where a cap is exceeded."""
        self._check(entry)
        for piece in (entry.header(), entry.content):
            self._digest.update(piece)
            self._file.write(piece)

    def _check(self, entry: SnapshotEntry) -> None:
        encoded = os.fsencode(entry.path)
        problem = problem_with(entry.path)
        if problem is not None:
            raise SnapshotRefused(f"{entry.path[:80]!r} {problem}")
        if encoded <= self._last:
            raise SnapshotRefused(f"{entry.path[:80]!r} is out of order")
        self._last = encoded
        self._left_entries -= 1
        self._left_bytes -= len(entry.content)
        if self._left_entries < 0 or self._left_bytes < 0:
            raise SnapshotRefused("the tree is larger than it may be")

    def commit(self) -> SnapshotId:
        """Make it durable. Writing the same tree twice stores it once."""
        snapshot = SnapshotId(PREFIX + self._digest.hexdigest())
        self._file.flush()
        place = place_of(self._folder, snapshot)
        if place.exists():
            return snapshot
        os.fsync(self._file.fileno())
        place.parent.mkdir(exist_ok=True)
        self._path.rename(place)
        sync_folder(place.parent)
        sync_folder(self._folder)
        return snapshot


class SnapshotStore:
    """Snapshots in one folder. Methods block on the disk: call them off the event loop."""

    def __init__(self, folder: Path, *, max_bytes: int = 1 << 30, max_entries: int = 1_000_000):
        """`max_bytes` and `max_entries` bound any one snapshot."""
        self._folder = folder
        self.max_bytes = max_bytes
        self.max_entries = max_entries
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._sweep()

    def _sweep(self) -> None:
        """Remove what killed writers left; an hour is longer than any write takes."""
        for path in self._folder.glob(f"{INCOMING}*"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > STALE_SECONDS:
                    path.unlink()

    def writer(
        self, *, max_bytes: int | None = None, max_entries: int | None = None
    ) -> SnapshotWriter:
        return SnapshotWriter(
            self._folder,
            min(max_bytes or self.max_bytes, self.max_bytes),
            min(max_entries or self.max_entries, self.max_entries),
        )

    def put(self, entries: Iterable[SnapshotEntry]) -> SnapshotId:
        """Store entries that are sorted by path. Raises SnapshotRefused; OSError on a full disk."""
        with self.writer() as writer:
            for entry in entries:
                writer.add(entry)
            return writer.commit()

    def put_files(self, files: Mapping[str, bytes]) -> SnapshotId:
        """Store the tree holding just these files; the id is `digest_of_files`."""
        return self.put(entries_of_files(files))

    def get(self, snapshot: SnapshotId) -> Iterator[SnapshotEntry]:
        """The entries, sorted; whole files one at a time.

        Raises SandboxError where the snapshot is unknown or, at the end, where its bytes do not
        match its name: use what was yielded only after the iteration has ended.
        """
        digest = hashlib.sha256()
        with self._open(snapshot) as file:
            self._expect(file.read(len(MAGIC)) == MAGIC, snapshot)
            digest.update(MAGIC)
            while head := file.read(HEADER):
                entry, raw = self._entry(file, head, snapshot)
                digest.update(raw)
                yield entry
        self._expect(PREFIX + digest.hexdigest() == snapshot, snapshot)

    def files(self, snapshot: SnapshotId) -> dict[str, bytes]:
        """Path → content of the regular files. Raises SandboxError as `get`."""
        return {e.path: e.content for e in self.get(snapshot) if e.kind == "file"}

    def _open(self, snapshot: SnapshotId) -> BinaryIO:
        try:
            return place_of(self._folder, snapshot).open("rb")
        except FileNotFoundError as error:
            raise SandboxError(f"there is no snapshot {snapshot} in {self._folder}") from error

    def _entry(
        self, file: BinaryIO, head: bytes, snapshot: SnapshotId
    ) -> tuple[SnapshotEntry, bytes]:
        path_size = int.from_bytes(head[3:7], "big")
        content_size = int.from_bytes(head[7:15], "big")
        left = os.fstat(file.fileno()).st_size - file.tell()
        whole = len(head) == HEADER and path_size + content_size <= left
        self._expect(whole and head[:1] in KINDS, snapshot)
        path, content = file.read(path_size), file.read(content_size)
        mode = int.from_bytes(head[1:3], "big")
        entry = SnapshotEntry(os.fsdecode(path), KINDS[head[:1]], mode, content)
        return entry, head + path + content

    def _expect(self, condition: bool, snapshot: SnapshotId) -> None:
        if not condition:
            raise SandboxError(f"snapshot {snapshot} in {self._folder} is damaged")


def place_of(folder: Path, snapshot: SnapshotId) -> Path:
    """Raises SandboxError for anything but `sha256:` and 64 hex digits."""
    digits = snapshot.removeprefix(PREFIX)
    if len(snapshot) != len(PREFIX) + 64 or not set(digits) <= set("0123456789abcdef"):
        raise SandboxError(f"{snapshot!r} is not a snapshot id; one reads sha256:<64 hex digits>")
    return folder / digits[:2] / digits[2:]


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
