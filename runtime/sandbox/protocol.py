"""The sandbox protocol: what a run needs from the place where its commands execute.

A `SandboxBackend` opens sandboxes; a `Sandbox` is one open workspace with one persistent helper
inside. Every back end passes the same contract suite (`runtime/sandbox/contract.py`). Whatever a
command does (time out, eat memory, flood its output) is data in `ExecResult`; only a failure of the
sandbox itself raises `SandboxError`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from runtime.run import SnapshotId

Strength = Literal["hard", "soft", "none"]
"""`hard`: kernel-enforced (cgroup, namespace); `soft`: rlimits and a supervisor; `none`: absent."""


class SandboxSpec(BaseModel):
    """A domain's `sandbox:` block."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    memory_bytes: int = Field(default=512 << 20, ge=16 << 20)
    disk_bytes: int = Field(default=64 << 20, ge=1 << 20)
    """Size of the workspace, enforced by a sized tmpfs."""
    inodes: int = Field(default=10_000, ge=64)
    processes: int = Field(default=64, ge=4)
    open_files: int = Field(default=256, ge=16)
    output_bytes: int = Field(default=256 << 10, ge=1 << 10)
    """Cap of stdout and of stderr of one call; the rest is read, counted and dropped."""
    seconds_per_call: float = Field(default=30.0, gt=0, le=3600)
    network: Literal["none"] = "none"
    environment: dict[str, str] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What one command did."""

    exit_code: int | None
    """None where a signal ended it."""
    signal: int | None
    stdout: bytes
    stderr: bytes
    truncated: bool
    timed_out: bool
    oom_killed: bool
    wall_seconds: float
    cpu_seconds: float = 0.0
    peak_memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One entry of a listing; `path` is relative to the workspace."""

    path: str
    kind: Literal["file", "directory", "link", "other"]
    size: int
    mode: int


class Sandbox(Protocol):
    """One open workspace. Commands run one after another; paths are relative to the workspace."""

    async def exec(
        self,
        command: Sequence[str] | str,
        *,
        stdin: bytes = b"",
        timeout: float | None = None,
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """Run an argv, or a script under `sh -c`; `timeout` can only shorten the spec's.

        At the time-out, and at the end of the call, every process it started is killed. Cancelling
        a call ends the sandbox. Raises ToolError for words or a folder that cannot be used.
        """
        ...

    async def read(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        """Content of a regular file beneath the workspace; links are never followed.

        Raises ToolError where the path is absent, not a regular file, longer than `max_bytes`, or
        leaves the workspace.
        """
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Create or replace a regular file and its parent folders. Raises ToolError as `read`."""
        ...

    async def list(self, path: str = ".", *, max_entries: int = 1_000) -> list[FileEntry]:
        """Everything beneath `path`, sorted by path."""
        ...

    async def snapshot(self) -> SnapshotId:
        """Store the workspace, content-addressed and durable; equal trees give equal ids.

        What was stored opens in the same spec. Raises ToolError for a tree the agent made unfit for
        that: names too long or too deep, or (by hard links and sparse files) content that would
        not fit again.
        """
        ...

    async def close(self) -> None:
        """Kill what runs and remove what was made. Idempotent."""
        ...


class SandboxBackend(Protocol):
    """Opens sandboxes on this host."""

    @property
    def name(self) -> str: ...

    async def open(
        self,
        spec: SandboxSpec,
        *,
        files: Mapping[str, bytes] | None = None,
        snapshot: SnapshotId | None = None,
    ) -> Sandbox:
        """A fresh workspace holding the snapshot (if any), then the files.

        Raises SandboxUnavailable where the host lacks what it takes, InputError for files that no
        such workspace can hold.
        """
        ...

    async def store(self, files: Mapping[str, bytes]) -> SnapshotId:
        """Store a workspace holding just these files, without opening a sandbox.

        The id is the one `snapshot()` would give a fresh sandbox opened on them.
        """
        ...

    async def read_snapshot(self, snapshot: SnapshotId) -> dict[str, bytes]:
        """The regular files of a stored snapshot, for the grader. Links are left out."""
        ...

    def strengths(self) -> dict[str, Strength]:
        """Limit name → how strongly it is enforced here (`noria doctor` prints it)."""
        ...

    async def close(self) -> None:
        """Close every sandbox still open and sweep leftovers. Idempotent."""
        ...
