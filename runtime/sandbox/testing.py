"""MemoryBackend: a fake sandbox for tests, in memory, with no isolation because nothing runs.

Files, listings and snapshots behave as the real ones do (the contract suite says so). Commands are
a handful of words interpreted here, plus whatever the test scripts; time does not pass: a `sleep`
past its time-out reports one at once. What it cannot do is listed in `unsupported`, by the names
the contract suite gives its features.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from runtime.errors import InputError, SandboxError, ToolError
from runtime.run import SnapshotId
from runtime.sandbox.paths import workspace_path
from runtime.sandbox.protocol import ExecResult, FileEntry, SandboxSpec, Strength
from runtime.sandbox.room import check_fits
from runtime.sandbox.snapshots import SnapshotStore, entries_of_files

Files = dict[str, bytes]
Script = Callable[[Sequence[str], bytes, Files], ExecResult | None]
"""Answers a command, given its words, its stdin and the files (to be changed in place)."""


def finished(
    exit_code: int | None = 0,
    stdout: bytes = b"",
    stderr: bytes = b"",
    *,
    timed_out: bool = False,
    truncated: bool = False,
    seconds: float = 0.0,
) -> ExecResult:
    return ExecResult(
        exit_code=None if timed_out else exit_code,
        signal=9 if timed_out else None,
        stdout=stdout,
        stderr=stderr,
        truncated=truncated,
        timed_out=timed_out,
        oom_killed=False,
        wall_seconds=seconds,
    )


class MemorySandbox:
    """A fake workspace. `commands` records what was asked, in order."""

    def __init__(
        self, spec: SandboxSpec, files: Files, snapshots: SnapshotStore, script: Script | None
    ) -> None:
        self._spec = spec
        self._files = files
        self._snapshots = snapshots
        self._script = script
        self._closed = False
        self.commands: list[Sequence[str] | str] = []

    async def exec(
        self,
        command: Sequence[str] | str,
        *,
        stdin: bytes = b"",
        timeout: float | None = None,
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        self._check_open()
        self.commands.append(command)
        words = shlex.split(command) if isinstance(command, str) else list(command)
        if not words:
            raise ToolError("there is no command to run")
        scripted = self._script(words, stdin, self._files) if self._script else None
        result = scripted or self._interpret(words, stdin, timeout)
        cap = self._spec.output_bytes
        if max(len(result.stdout), len(result.stderr)) <= cap:
            return result
        return finished(result.exit_code, result.stdout[:cap], result.stderr[:cap], truncated=True)

    def _interpret(self, words: list[str], stdin: bytes, timeout: float | None) -> ExecResult:
        match words:
            case ["true"]:
                return finished()
            case ["false"]:
                return finished(1)
            case ["exit", code]:
                return finished(int(code))
            case ["echo", *rest]:
                return finished(stdout=" ".join(rest).encode() + b"\n")
            case ["cat"]:
                return finished(stdout=stdin)
            case ["cat", path] if path in self._files:
                return finished(stdout=self._files[path])
            case ["sleep", seconds]:
                limit = min(timeout or self._spec.seconds_per_call, self._spec.seconds_per_call)
                late = float(seconds) > limit
                return finished(timed_out=late, seconds=min(float(seconds), limit))
            case _:
                return finished(127, stderr=f"{words[0]}: not known to MemorySandbox\n".encode())

    async def read(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        self._check_open()
        name = workspace_path(path)
        content = self._files.get(name)
        if content is None:
            folder = name == "." or any(each.startswith(f"{name}/") for each in self._files)
            raise ToolError(f"{name!r} " + ("is a folder" if folder else "does not exist"))
        if len(content) > max_bytes:
            raise ToolError(f"{name!r} has {len(content)} bytes; {max_bytes} may be read")
        return content

    async def write(self, path: str, data: bytes) -> None:
        self._check_open()
        changed = {**self._files, workspace_path(path): data}
        try:
            _check_fits(changed, self._spec)
        except InputError as error:
            raise ToolError(str(error)) from error
        self._files = changed

    async def list(self, path: str = ".", *, max_entries: int = 1_000) -> list[FileEntry]:
        self._check_open()
        name = workspace_path(path)
        prefix = "" if name == "." else f"{name}/"
        entries = [e for e in entries_of_files(self._files) if e.path.startswith(prefix)]
        if not entries and prefix:
            raise ToolError(f"{name!r} is not a folder")
        return [FileEntry(e.path, e.kind, len(e.content), e.mode) for e in entries][:max_entries]

    async def snapshot(self) -> SnapshotId:
        self._check_open()
        return self._snapshots.put_files(self._files)

    async def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError("this sandbox is gone: it was closed")


class MemoryBackend:
    """A fake back end. Snapshots are real files, under `state_dir` or a temporary folder."""

    unsupported: frozenset[str] = frozenset(
        {"shell", "environment", "isolation", "limits", "links", "empty_folders", "background"}
    )
    """Features of the contract suite that this fake does not have."""

    def __init__(self, *, state_dir: Path | None = None, script: Script | None = None) -> None:
        self._temporary = None if state_dir else TemporaryDirectory(prefix="noria-memory-")
        folder = state_dir or Path(self._temporary.name if self._temporary else "")
        self.snapshots = SnapshotStore(folder / "snapshots")
        self._script = script
        self.opened: list[MemorySandbox] = []

    @property
    def name(self) -> str:
        return "memory"

    async def open(
        self,
        spec: SandboxSpec,
        *,
        files: Mapping[str, bytes] | None = None,
        snapshot: SnapshotId | None = None,
    ) -> MemorySandbox:
        content = self.snapshots.files(snapshot) if snapshot is not None else {}
        content |= {workspace_path(path): data for path, data in _checked(files or {}).items()}
        _check_fits(content, spec)
        sandbox = MemorySandbox(spec, content, self.snapshots, self._script)
        self.opened.append(sandbox)
        return sandbox

    async def store(self, files: Mapping[str, bytes]) -> SnapshotId:
        return self.snapshots.put_files(files)

    async def read_snapshot(self, snapshot: SnapshotId) -> dict[str, bytes]:
        return self.snapshots.files(snapshot)

    def strengths(self) -> dict[str, Strength]:
        return {}

    async def close(self) -> None:
        for sandbox in self.opened:
            await sandbox.close()
        if self._temporary is not None:
            self._temporary.cleanup()


def _checked(files: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """Raises InputError for names that no workspace can hold."""
    list(entries_of_files(files))
    return files


def _check_fits(files: Files, spec: SandboxSpec) -> None:
    check_fits(entries_of_files(files), spec)
