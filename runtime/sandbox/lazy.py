"""A sandbox that opens at its first use: most runs of many domains never need one."""

from collections.abc import Mapping, Sequence

from runtime.run import SnapshotId
from runtime.sandbox.protocol import ExecResult, FileEntry, Sandbox, SandboxBackend, SandboxSpec


class LazySandbox:
    """Opens the real sandbox at its first use: most runs of many domains never need one."""

    def __init__(self, backend: SandboxBackend, spec: SandboxSpec, workspace: SnapshotId) -> None:
        self._backend = backend
        self._spec = spec
        self._workspace = workspace
        self._sandbox: Sandbox | None = None

    async def _open(self) -> Sandbox:
        if self._sandbox is None:
            self._sandbox = await self._backend.open(self._spec, snapshot=self._workspace)
        return self._sandbox

    async def exec(
        self,
        command: Sequence[str] | str,
        *,
        stdin: bytes = b"",
        timeout: float | None = None,
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        sandbox = await self._open()
        return await sandbox.exec(command, stdin=stdin, timeout=timeout, cwd=cwd, env=env)

    async def read(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        return await (await self._open()).read(path, max_bytes=max_bytes)

    async def write(self, path: str, data: bytes) -> None:
        await (await self._open()).write(path, data)

    async def list(self, path: str = ".", *, max_entries: int = 1_000) -> list[FileEntry]:
        return await (await self._open()).list(path, max_entries=max_entries)

    async def snapshot(self) -> SnapshotId:
        return await (await self._open()).snapshot()

    async def close(self) -> None:
        if self._sandbox is not None:
            await self._sandbox.close()
