"""Whether a tree fits into a workspace, known before anything is sent into one."""

from collections.abc import Iterable

from runtime.errors import InputError
from runtime.sandbox.inside.bounds import PAGE, pages, whole_pages
from runtime.sandbox.protocol import SandboxSpec
from runtime.sandbox.snapshots import LETTERS, SnapshotEntry


def check_fits(entries: Iterable[SnapshotEntry], spec: SandboxSpec) -> None:
    """Raises InputError for more files than the spec allows, or more content than its disk."""
    count = taken = 0
    for entry in entries:
        count += 1
        taken += pages(LETTERS[entry.kind], len(entry.content))
    if count > spec.inodes:
        raise InputError(
            f"there are {count} files and folders, the workspace can hold {spec.inodes}"
        )
    if taken > whole_pages(spec.disk_bytes):
        raise InputError(
            f"files take {taken * PAGE} bytes (each in whole pages of {PAGE}), "
            f"the workspace has {spec.disk_bytes}"
        )
