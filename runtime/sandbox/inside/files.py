"""The workspace as the helper sees it: reads, writes and walks that never follow a link.

Every path is opened component by component from the workspace's own descriptor with O_NOFOLLOW, so
neither `..`, an absolute path nor a planted link leaves it. Only regular files are read, opened
without blocking, so that a FIFO cannot hang the helper. Nothing else runs while these functions do:
the helper has killed the last call's processes. Where the agent took the owner's own permission to
read away, the helper gives it back, for good: a snapshot must not fail because of a `chmod 0`.
"""

import errno
import os
import stat
from collections.abc import Iterable, Iterator

from .bounds import MAX_DEPTH, MAX_PATH, PAGE, pages
from .wire import CHUNK

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

Entry = tuple[bytes, int, int, bytes]
"""(kind, mode, size, path): kind is `f`, `d`, `l` or `o`; path is relative to the workspace."""

TOO_LONG = f"is nested too deep: a path has at most {MAX_DEPTH} names and {MAX_PATH} bytes"
REASONS = {
    errno.ENOENT: "does not exist",
    errno.ENOTDIR: "is not a folder (links are not followed)",
    errno.EISDIR: "is a folder, not a file",
    errno.EEXIST: "exists already and is something else",
    errno.ELOOP: "is a link; links are not followed",
    errno.ENXIO: "is not a regular file",
    errno.ENOSPC: "does not fit: the workspace is full",
    errno.EFBIG: "does not fit: it is larger than a file may be",
    errno.ENAMETOOLONG: "has a name longer than 255 bytes",
}


class Refused(Exception):
    """The agent's fault; the text is for the agent."""


def shown(path: bytes) -> str:
    return repr(path.decode("utf-8", "replace"))


def split(path: bytes) -> list[bytes]:
    """Components of a relative path. The host has checked it already: this is the second lock."""
    parts = [part for part in path.split(b"/") if part not in (b"", b".")]
    if path.startswith(b"/") or b".." in parts or b"\0" in path:
        raise Refused(f"{shown(path)} leaves the workspace")
    if len(parts) > MAX_DEPTH:
        raise Refused(f"{shown(path[:64])}… {TOO_LONG}")
    return parts


def explain(path: bytes, error: OSError) -> Refused:
    reason = REASONS.get(error.errno or 0, f"cannot be used: {error.strerror}")
    return Refused(f"{shown(path)} {reason}")


# ---------------------------------------------------------------- opening


def open_folder(root: int, parts: list[bytes], *, create: bool = False) -> int:
    """A descriptor of the folder, to be closed by the caller."""
    at = os.dup(root)
    try:
        for depth, name in enumerate(parts):
            try:
                below = _step(at, name, create)
            except OSError as error:
                raise explain(b"/".join(parts[: depth + 1]), error) from error
            os.close(at)
            at = below
    except BaseException:
        os.close(at)
        raise
    return at


def _step(at: int, name: bytes, create: bool) -> int:
    try:
        return _open_owned(at, name, FOLDER, 0o500)
    except FileNotFoundError:
        if not create:
            raise
        os.mkdir(name, 0o755, dir_fd=at)
        return os.open(name, FOLDER, dir_fd=at)


def _open_owned(at: int, name: bytes, flags: int, access: int) -> int:
    """Open `name`, first giving its owner the access bits that it lacks."""
    mode = os.stat(name, dir_fd=at, follow_symlinks=False).st_mode
    if mode & access != access and (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        os.chmod(name, stat.S_IMODE(mode) | access, dir_fd=at)
    return os.open(name, flags, dir_fd=at)


def open_file(root: int, path: bytes) -> tuple[int, int]:
    """(descriptor, size in bytes) of a regular file; the caller closes it."""
    parts = split(path)
    if not parts:
        raise Refused("'.' is a folder, not a file")
    folder = open_folder(root, parts[:-1])
    try:
        opened = _open_owned(folder, parts[-1], os.O_RDONLY | FILE, 0o400)
    except OSError as error:
        raise explain(path, error) from error
    finally:
        os.close(folder)
    status = os.fstat(opened)
    if not stat.S_ISREG(status.st_mode):
        os.close(opened)
        what = "a folder, not a file" if stat.S_ISDIR(status.st_mode) else "not a regular file"
        raise Refused(f"{shown(path)} is {what}")
    return opened, status.st_size


# ---------------------------------------------------------------- reading


def read_chunks(root: int, path: bytes, limit: int) -> Iterator[bytes]:
    """The file's content. Raises Refused where it is longer than `limit` bytes."""
    opened, size = open_file(root, path)
    try:
        if size > limit:
            raise Refused(f"{shown(path)} has {size} bytes, more than the {limit} that may be read")
        left = size
        while left > 0 and (chunk := os.read(opened, min(CHUNK, left))):
            left -= len(chunk)
            yield chunk
    finally:
        os.close(opened)


def walk(root: int, path: bytes) -> Iterator[Entry]:
    """Everything beneath a folder, in the order of the bytes of the paths.

    Holds the names of one folder per level, never the whole tree, whose paths may take far more
    memory than the helper has.
    """
    parts = split(path)
    yield from _walk(open_folder(root, parts), b"/".join(parts), len(parts))


def _walk(folder: int, prefix: bytes, depth: int) -> Iterator[Entry]:
    """What lies beneath `folder`, which is closed at the end."""
    try:
        for key in _in_order(folder):
            name = key.rstrip(b"/")
            path = prefix + b"/" + name if prefix else name
            if depth >= MAX_DEPTH or len(path) > MAX_PATH:
                raise Refused(f"{shown(path[:64])}… {TOO_LONG}")
            if key == name:
                yield _entry(folder, name, path)
            else:
                yield from _walk(_open_owned(folder, name, FOLDER, 0o500), path, depth + 1)
    finally:
        os.close(folder)


def _in_order(folder: int) -> list[bytes]:
    """The folder's names, and for each folder in it its name with a slash: the place of what it
    holds, which is not right behind it (`a`, `a.txt`, `a/b`)."""
    keys: list[bytes] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            name = os.fsencode(entry.name)
            keys += [name, name + b"/"] if entry.is_dir(follow_symlinks=False) else [name]
    keys.sort()
    return keys


def _entry(folder: int, name: bytes, path: bytes) -> Entry:
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    kind = _kind(status.st_mode)
    return kind, _mode(kind, status.st_mode), status.st_size if kind in b"fl" else 0, path


def _mode(kind: bytes, mode: int) -> int:
    """Permission bits, with those the helper needs and gives itself where they are missing."""
    bits = mode & 0o777
    return bits | {b"f": 0o400, b"d": 0o500}.get(kind, 0)


def _kind(mode: int) -> bytes:
    if stat.S_ISREG(mode):
        return b"f"
    if stat.S_ISDIR(mode):
        return b"d"
    return b"l" if stat.S_ISLNK(mode) else b"o"


def check_restorable(entries: Iterable[Entry], disk_pages: int, most: int) -> None:
    """Refuse a tree that a fresh workspace with this room could not hold.

    This one may hold it all the same: hard links share their content, and files may have holes.
    """
    count = taken = 0
    for kind, _, size, _ in entries:
        count += 1
        taken += pages(kind, size)
    if taken > disk_pages:
        raise Refused(
            f"the workspace cannot be stored: its files claim {taken * PAGE} bytes (each hard link "
            f"and hole counts in full, in pages of {PAGE}), there is room for {disk_pages * PAGE}"
        )
    if count > most:
        raise Refused(f"the workspace cannot be stored: it has {count} files, {most} are allowed")


def link_target(root: int, path: bytes) -> bytes:
    parts = split(path)
    folder = open_folder(root, parts[:-1])
    try:
        return os.readlink(parts[-1], dir_fd=folder)
    finally:
        os.close(folder)


# ---------------------------------------------------------------- writing


class Incoming:
    """Entries on their way in, in chunks; each appears under its name only when it is complete.

    The host sends any number of them without waiting for answers. The first failure is kept, what
    follows it is dropped, and `settle` raises it.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._file: int | None = None
        self._name = b""
        self._failure: Refused | None = None

    def add(self, last: bool, mode: int, kind: bytes, path: bytes, chunk: bytes) -> None:
        """`mode` 0 keeps the mode of a file that exists, 0644 for a new one."""
        if self._failure is not None:
            return
        try:
            self._add(last, mode, kind, path, chunk)
        except Refused as refused:
            self._fail(refused)
        except OSError as error:
            self._fail(explain(path, error))

    def settle(self) -> None:
        """Raises the first failure since the last time."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _fail(self, refused: Refused) -> None:
        self._failure = refused
        if self._file is not None:
            os.close(self._file)
            os.unlink(self._name, dir_fd=self._root)
            self._file = None

    def _add(self, last: bool, mode: int, kind: bytes, path: bytes, chunk: bytes) -> None:
        if kind == b"d":
            _make_folder(self._root, path, mode)
        elif kind == b"l":
            _make_link(self._root, path, chunk)
        else:
            self._write(chunk)
            if last:
                self._finish(path, mode)

    def _write(self, chunk: bytes) -> None:
        if self._file is None:
            self._name = b".noria-" + os.urandom(8).hex().encode()
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | FILE
            self._file = os.open(self._name, flags, 0o600, dir_fd=self._root)
        view = memoryview(chunk)
        while view:
            view = view[os.write(self._file, view) :]

    def _finish(self, path: bytes, mode: int) -> None:
        assert self._file is not None
        folder, name = _parent(self._root, path)
        try:
            os.fchmod(self._file, mode or _mode_of(folder, name, path))
            os.rename(self._name, name, src_dir_fd=self._root, dst_dir_fd=folder)
        finally:
            os.close(folder)
        os.close(self._file)
        self._file = None


def _parent(root: int, path: bytes) -> tuple[int, bytes]:
    parts = split(path)
    if not parts:
        raise Refused("'.' is a folder, not a file")
    return open_folder(root, parts[:-1], create=True), parts[-1]


def _mode_of(folder: int, name: bytes, path: bytes) -> int:
    try:
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return 0o644
    if stat.S_ISLNK(mode):
        raise Refused(f"{shown(path)} is a link; links are not followed")
    if not stat.S_ISREG(mode):
        what = "a folder, not a file" if stat.S_ISDIR(mode) else "not a regular file"
        raise Refused(f"{shown(path)} is {what}")
    return stat.S_IMODE(mode)


def _make_folder(root: int, path: bytes, mode: int) -> None:
    opened = open_folder(root, split(path), create=True)
    try:
        os.fchmod(opened, mode)
    finally:
        os.close(opened)


def _make_link(root: int, path: bytes, target: bytes) -> None:
    folder, name = _parent(root, path)
    try:
        os.symlink(target, name, dir_fd=folder)
    finally:
        os.close(folder)
