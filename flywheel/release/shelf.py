"""The shelf: one immutable folder per adapter, complete or not there.

Files are taken in through descriptors that follow no link, bounded before they are read, into a
folder with a name that nothing looks at; only when everything is checked and synced is it renamed
to its final name. A process that dies in between leaves a `.part-…` folder, which is never
loadable and is swept later.

Scaling out: the shelf is a folder on storage that workers and engines share.
"""

import errno
import hashlib
import os
import secrets
import shutil
import stat
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from flywheel.release.inspection import CONFIG, WEIGHTS
from runtime.errors import AdapterRefused, StoreError

MAX_WEIGHTS_BYTES = 4 << 30
MAX_SMALL_BYTES = 16 << 20
"""Of configuration, manifest and probe."""
_PART = ".part-"
STALE_SECONDS = 3600.0
"""A part older than this belongs to a process that died."""
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_BLOCK = 1 << 20


@contextmanager
def part(shelf: Path) -> Generator[Path]:
    """A folder to fill; removed at the end unless it was placed.

    Raises StoreError where it cannot be written, a full disk above all.
    """
    folder = shelf / f"{_PART}{secrets.token_hex(8)}"
    try:
        shelf.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o755)
        yield folder
    except OSError as error:
        raise StoreError(
            f"an adapter cannot be saved in {shelf}: {error.strerror or error}; nothing was "
            "registered and what serves goes on serving"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def place(folder: Path, name: str) -> Path:
    """Give a filled part its final name; what an unregistered attempt left there goes."""
    final = folder.parent / name
    if final.exists():
        abandoned = final.with_name(f"{_PART}{secrets.token_hex(8)}")
        final.rename(abandoned)
        shutil.rmtree(abandoned, ignore_errors=True)
    _sync_folder(folder)
    folder.rename(final)
    _sync_folder(folder.parent)
    return final


def sweep(shelf: Path, *, older_than: float = STALE_SECONDS) -> list[str]:
    """Remove parts untouched for `older_than` seconds; their names."""
    swept: list[str] = []
    for folder in shelf.glob(f"{_PART}*"):
        try:
            touched = folder.stat().st_mtime
        except FileNotFoundError:
            continue  # finished or swept by another worker this instant
        if touched <= time.time() - older_than:
            shutil.rmtree(folder, ignore_errors=True)
            swept.append(folder.name)
    return swept


# ---------------------------------------------------------------- files


def write(folder: Path, name: str, content: bytes) -> None:
    """Write one file of a part, read-only and synced."""
    with (folder / name).open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        os.fchmod(file.fileno(), 0o444)


def copy(source: Path, folder: Path, name: str) -> None:
    """Take one file of `source` into a part. Raises AdapterRefused for a link or a huge file."""
    descriptor = _open_regular(source, name, MAX_WEIGHTS_BYTES)
    with os.fdopen(descriptor, "rb") as theirs, (folder / name).open("xb") as ours:
        shutil.copyfileobj(theirs, ours, _BLOCK)
        ours.flush()
        os.fsync(ours.fileno())
        os.fchmod(ours.fileno(), 0o444)


def read_small(folder: Path, name: str) -> bytes:
    """A small file, whole. Raises AdapterRefused where it is missing, a link or too large."""
    with os.fdopen(_open_regular(folder, name, MAX_SMALL_BYTES), "rb") as file:
        return file.read(MAX_SMALL_BYTES)


def refuse_pickles(folder: Path) -> None:
    """Raises AdapterRefused where pickled weights lie beside, or instead of, safetensors."""
    try:
        found = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    except OSError as error:
        raise AdapterRefused(
            f"{folder.name!r} is no folder that can be read: {error.strerror}", reason="missing"
        ) from error
    if found:
        raise AdapterRefused(
            f"{', '.join(found)}: pickled weights are never read; adapters are safetensors only",
            reason="pickle",
        )


def digest_of(folder: Path, names: Sequence[str] = (CONFIG, WEIGHTS)) -> str:
    """`sha256:…` over name, size and bytes of the files. Raises AdapterRefused as `copy` does."""
    digest = hashlib.sha256()
    for name in names:
        with os.fdopen(_open_regular(folder, name, MAX_WEIGHTS_BYTES), "rb") as file:
            digest.update(f"{name}\0{os.fstat(file.fileno()).st_size}\0".encode())
            while block := file.read(_BLOCK):
                digest.update(block)
    return f"sha256:{digest.hexdigest()}"


def _open_regular(folder: Path, name: str, most: int) -> int:
    """A descriptor of a regular file directly in the folder, neither of them a link."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        within = os.open(folder, flags | os.O_DIRECTORY)
    except OSError as error:
        raise _unreadable(folder.name, error) from error
    try:
        descriptor = os.open(name, flags | os.O_NONBLOCK, dir_fd=within)
    except OSError as error:
        raise _unreadable(f"{folder.name}/{name}", error) from error
    finally:
        os.close(within)
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_size <= most:
        return descriptor
    os.close(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise AdapterRefused(f"{name} is not a regular file", reason="not_a_file")
    raise AdapterRefused(f"{name} has {found.st_size} bytes; at most {most}", reason="too_large")


def _unreadable(what: str, error: OSError) -> AdapterRefused:
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return AdapterRefused(f"{what} is a link; adapters are plain files", reason="symlink")
    if error.errno == errno.ENOENT:
        return AdapterRefused(f"{what} is missing", reason="missing")
    return AdapterRefused(f"{what} cannot be read: {error.strerror}", reason="missing")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
