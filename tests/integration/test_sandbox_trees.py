"""Whatever a command leaves behind: the agent is told, or the tree opens again as it was."""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.errors import SandboxError, ToolError
from runtime.sandbox.bubblewrap import BubblewrapBackend
from runtime.sandbox.protocol import SandboxSpec

TINY = SandboxSpec(memory_bytes=64 << 20, disk_bytes=1 << 20, inodes=64, processes=8)

BUILD = """
import json, os, sys
for number, (kind, size, count) in enumerate(json.load(sys.stdin)):
    try:
        if kind == "file":
            for each in range(count):
                with open(f"{number}.{each}", "wb") as file:
                    file.write(bytes(size))
        elif kind == "hole":
            with open(f"{number}", "wb") as file:
                file.truncate(size)
        elif kind == "hard":
            with open(f"{number}.0", "wb") as file:
                file.write(bytes(size))
            for each in range(1, count):
                os.link(f"{number}.0", f"{number}.{each}")
        elif kind == "link":
            for each in range(count):
                os.symlink("t" * (size % 4_000 + 1), f"{number}.{each}")
        elif kind == "deep":
            path = "/".join(["n" * (size % 255 + 1)] * count)
            os.makedirs(path)
            open(f"{path}/end", "w").close()
        elif kind == "fifo":
            os.mkfifo(f"{number}")
        elif kind == "closed":
            os.mkdir(f"{number}")
            open(f"{number}/x", "w").close()
            os.chmod(f"{number}", size % 0o1000)
    except OSError:
        pass
"""
KINDS = ["file", "hole", "hard", "link", "deep", "fifo", "closed"]
SIZES = st.sampled_from([0, 1, 127, 128, 4_095, 4_096, 4_097, 65_536, 1 << 20, 1_000_000])
ACTIONS = st.lists(
    st.tuples(st.sampled_from(KINDS), SIZES | st.integers(0, 70_000), st.integers(1, 60)),
    min_size=1,
    max_size=6,
)


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(ACTIONS)
async def test_what_is_stored_can_be_opened(
    bubblewrap: BubblewrapBackend, actions: list[tuple[str, int, int]]
) -> None:
    sandbox = await bubblewrap.open(TINY)
    built = await sandbox.exec(["python3", "-c", BUILD], stdin=json.dumps(actions).encode())
    assert built.exit_code == 0, built.stderr
    try:
        snapshot = await sandbox.snapshot()
    except ToolError:
        return
    finally:
        await sandbox.close()
    again = await bubblewrap.open(TINY, snapshot=snapshot)
    assert await again.snapshot() == snapshot
    await again.close()


async def test_a_file_takes_the_place_of_a_stored_one(bubblewrap: BubblewrapBackend) -> None:
    """Also where there is no room for both."""
    large = bytes(TINY.disk_bytes)
    sandbox = await bubblewrap.open(TINY, files={"x": large})
    snapshot = await sandbox.snapshot()
    again = await bubblewrap.open(TINY, snapshot=snapshot, files={"x": large[1:]})
    assert await again.read("x", max_bytes=len(large)) == large[1:]


async def test_the_store_bounds_what_a_sandbox_may_keep(bubblewrap: BubblewrapBackend) -> None:
    """Even where the spec allows more, the agent is told; the sandbox goes on."""
    sandbox = await bubblewrap.open(TINY)
    await sandbox.write("x", bytes(100_000))
    bubblewrap.snapshots.max_bytes = 50_000
    with pytest.raises(ToolError, match="there is room for"):
        await sandbox.snapshot()
    await sandbox.write("x", b"")
    bubblewrap.snapshots.max_entries = 0
    with pytest.raises(ToolError, match="0 are allowed"):
        await sandbox.snapshot()
    assert (await sandbox.exec(["true"])).exit_code == 0


async def test_a_helper_that_stands_still_is_given_up(
    bubblewrap: BubblewrapBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = await bubblewrap.open(TINY)
    (note,) = (tmp_path / "state" / "sandboxes").glob("*.json")
    outer = int(json.loads(note.read_text())["process"].partition(":")[0])
    children = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGSTOP)
    monkeypatch.setattr("runtime.sandbox.channel.SEND_SECONDS", 0.1)
    async with asyncio.timeout(10):
        with pytest.raises(SandboxError, match="took nothing"):
            await sandbox.write("x", bytes(1 << 20))
        with pytest.raises(SandboxError, match="gone"):
            await sandbox.exec(["true"])
        await sandbox.close()
