"""The machinery of the sandbox contract: cases, how they are registered, how they complain."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from runtime.errors import NoriaError
from runtime.sandbox.protocol import ExecResult, Sandbox, SandboxBackend, SandboxSpec

SMALL = SandboxSpec(
    memory_bytes=96 << 20,
    disk_bytes=4 << 20,
    inodes=256,
    processes=16,
    output_bytes=64 << 10,
    seconds_per_call=20,
)


class ContractBroken(AssertionError):
    """What the back end did that the protocol does not allow."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    needs: frozenset[str]
    """Of: shell, environment, isolation, limits, links, empty_folders, background."""
    check: Callable[[SandboxBackend], Awaitable[None]]


InSandbox = Callable[[Sandbox], Awaitable[None]]


OfBackend = Callable[[SandboxBackend], Awaitable[None]]


class Cases(list[Case]):
    """The cases of one file, in order; its methods are decorators that add to it."""

    def in_sandbox(self, *needs: str) -> Callable[[InSandbox], InSandbox]:
        """A check that wants one small sandbox."""

        def register(check: InSandbox) -> InSandbox:
            async def run(backend: SandboxBackend) -> None:
                sandbox = await backend.open(SMALL)
                try:
                    await check(sandbox)
                finally:
                    await sandbox.close()

            self.append(Case(check.__name__, frozenset(needs), run))
            return check

        return register

    def of_backend(self, *needs: str) -> Callable[[OfBackend], OfBackend]:
        """A check that opens its own sandboxes."""

        def register(check: OfBackend) -> OfBackend:
            self.append(Case(check.__name__, frozenset(needs), check))
            return check

        return register


def demand(condition: bool, promise: str, seen: object = "") -> None:
    if not condition:
        raise ContractBroken(f"{promise}; seen: {seen!r}")


async def refuses(act: Awaitable[object], kind: type[NoriaError], promise: str) -> None:
    try:
        seen = await act
    except kind:
        return
    raise ContractBroken(f"{promise} ({kind.__name__}); seen: {seen!r}")


async def shell(sandbox: Sandbox, script: str, *, timeout: float | None = None) -> ExecResult:
    return await sandbox.exec(script, timeout=timeout)


async def python(sandbox: Sandbox, code: str, *, timeout: float | None = None) -> ExecResult:
    return await sandbox.exec(["python3", "-"], stdin=code.encode(), timeout=timeout)


async def still_works(sandbox: Sandbox) -> None:
    result = await sandbox.exec(["echo", "here"])
    demand(result.stdout == b"here\n", "the sandbox survives what its commands do", result)


async def alone(sandbox: Sandbox) -> None:
    result = await shell(sandbox, "ls -d /proc/[0-9]* | wc -l")
    demand(int(result.stdout) <= 4, "nothing of an earlier call is left running", result)
