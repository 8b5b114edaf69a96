"""The contract of every sandbox back end about awkward trees: whatever was stored can be opened.

A snapshot is taken after an agent's call and opened when its run is resumed, so one that cannot be
opened would lose a run: what does not fit again is refused while the agent can still mend it.
"""

import asyncio

from runtime.errors import InputError, ToolError
from runtime.sandbox.contract_cases import SMALL, Cases, demand, python, refuses, shell
from runtime.sandbox.protocol import Sandbox, SandboxBackend, SandboxSpec

TREES = Cases()
OPENING_SECONDS = 60.0
"""Far more than opening the largest of these trees takes."""
MANY = 20_000
WIDE = SMALL.model_copy(update={"inodes": MANY + 1_000, "memory_bytes": 256 << 20})


async def keeps(backend: SandboxBackend, sandbox: Sandbox, spec: SandboxSpec) -> None:
    """The snapshot of a sandbox opens in the spec that it was made in, to the same tree."""
    snapshot = await sandbox.snapshot()
    async with asyncio.timeout(OPENING_SECONDS):
        again = await backend.open(spec, snapshot=snapshot)
    try:
        demand(await again.snapshot() == snapshot, "opening a snapshot gives the same tree")
    finally:
        await again.close()


@TREES.of_backend()
async def very_many_files_can_be_opened(backend: SandboxBackend) -> None:
    async with asyncio.timeout(OPENING_SECONDS):
        sandbox = await backend.open(WIDE, files={str(each): b"" for each in range(MANY)})
    try:
        listed = await sandbox.list(max_entries=2 * MANY)
        demand(len(listed) == MANY, "every file is there", len(listed))
    finally:
        await sandbox.close()


@TREES.of_backend()
async def files_that_take_too_much_room_are_refused(backend: SandboxBackend) -> None:
    pages = {str(each): b"x" for each in range(SMALL.inodes - 1)}
    tight = SMALL.model_copy(update={"disk_bytes": 1 << 20, "inodes": 4_096})
    sandbox = await backend.open(SMALL, files=pages)
    await sandbox.close()
    many = {str(each): b"" for each in range(SMALL.inodes + 1)}
    await refuses(backend.open(SMALL, files=many), InputError, "too many files are refused")
    pages = {str(each): b"x" for each in range(257)}
    await refuses(backend.open(tight, files=pages), InputError, "a file takes whole pages")


LINKS_OF_ONE_FILE = """
import os
os.mkdir("links")
open("links/0", "wb").write(bytes({size}))
for each in range(1, {links}):
    os.link("links/0", f"links/{{each}}")
"""


@TREES.of_backend("shell", "links")
async def hard_links_are_kept_or_refused(backend: SandboxBackend) -> None:
    """A snapshot has as many files as there are names, and so has what is opened from it."""
    sandbox = await backend.open(WIDE)
    try:
        await python(sandbox, LINKS_OF_ONE_FILE.format(size=10_000, links=1_500))
        await refuses(sandbox.snapshot(), ToolError, "more than the disk holds is refused")
        await shell(sandbox, "rm -r links")
        await python(sandbox, LINKS_OF_ONE_FILE.format(size=4_097, links=512))
        await keeps(backend, sandbox, WIDE)
        await shell(sandbox, "ln links/0 links/one_too_many")
        await refuses(sandbox.snapshot(), ToolError, "one file more is refused")
    finally:
        await sandbox.close()


SHORT_LINKS = """
import os
for each in range(12_000):
    os.symlink("t" * 127, str(each))
for each in range(256):
    os.symlink("t" * 128, f"long{each}")
"""


@TREES.of_backend("shell", "links")
async def very_many_links_are_kept(backend: SandboxBackend) -> None:
    """A short link takes no room on the disk, so more bytes of targets may lie there than fit."""
    spec = WIDE.model_copy(update={"disk_bytes": 1 << 20})
    sandbox = await backend.open(spec)
    try:
        await python(sandbox, SHORT_LINKS)
        await keeps(backend, sandbox, spec)
    finally:
        await sandbox.close()


LONG_NAMES = """
import os
for _ in range(15):
    os.mkdir("n" * 250)
    os.chdir("n" * 250)
for each in range(9_000):
    os.symlink("t", f"{each:0200}")
"""


@TREES.of_backend("shell")
async def a_tree_larger_than_the_memory_is_kept(backend: SandboxBackend) -> None:
    """Its paths alone take 35 MB."""
    spec = WIDE.model_copy(update={"memory_bytes": 16 << 20, "disk_bytes": 1 << 20})
    sandbox = await backend.open(spec)
    try:
        built = await python(sandbox, LONG_NAMES)
        demand(built.exit_code == 0, "the tree can be made", built)
        await sandbox.list()
        await keeps(backend, sandbox, spec)
    finally:
        await sandbox.close()


LONG_PATH = """
import os
for _ in range({depth}):
    os.mkdir("{name}")
    os.chdir("{name}")
open("f", "w")
"""


@TREES.of_backend("shell")
async def names_that_are_too_long_are_refused(backend: SandboxBackend) -> None:
    """What the host would not accept back is the agent's to mend, not a fault of the sandbox."""
    sandbox = await backend.open(WIDE)
    try:
        for name, depth in (("d", 128), ("n" * 255, 16)):
            await python(sandbox, LONG_PATH.format(name=name, depth=depth))
            await refuses(sandbox.snapshot(), ToolError, "a path too long is refused")
            await refuses(sandbox.list(), ToolError, "a path too long is not listed")
            await shell(sandbox, f"rm -r {name}")
        await python(sandbox, LONG_PATH.format(name="d", depth=127))
        await keeps(backend, sandbox, WIDE)
    finally:
        await sandbox.close()
