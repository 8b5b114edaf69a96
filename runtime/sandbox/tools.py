"""The sandbox as tools for the agent: shell, python, read_file, write_file, list_files.

What the model reads is short: long output is cut in the middle, keeping head and tail, with a
marker that says how much is missing and how to see it. Bytes that are no UTF-8 are shown with
replacement characters. A command that fails is content with its exit code, because that is what the
agent must react to; only misuse (no such file, no sandbox) is a ToolError.
"""

from collections.abc import Awaitable, Callable

from runtime.errors import ToolError
from runtime.run import Effect
from runtime.sandbox.protocol import ExecResult, FileEntry, Sandbox
from runtime.tools import Tool, ToolContext, ToolOutput, tool

SHOWN_CHARACTERS = 1_200
"""Longest content of one result: a small model's window must hold several."""
LARGEST_READ = 8 << 20
"""Bytes of a file that read_file takes in to show its head and tail."""
SHOWN_ENTRIES = 100
ROOT = "/workspace"


def sandbox_tools(shown: int = SHOWN_CHARACTERS) -> list[Tool]:
    """The five tools; `shown` is the longest content of one result, in characters."""
    workspace, none = Effect.WORKSPACE, Effect.NONE
    return [
        tool(_shell(shown), effect=workspace, name="shell"),
        tool(_python(shown), effect=workspace, name="python"),
        tool(_read_file(shown), effect=none, name="read_file"),
        tool(write_file, effect=workspace, name="write_file"),
        tool(list_files, effect=none, name="list_files"),
    ]


def _shell(shown: int) -> Callable[..., Awaitable[ToolOutput]]:
    async def shell(context: ToolContext, command: str) -> ToolOutput:
        """Run a shell command in the workspace."""
        sandbox = _sandbox(context)
        return report(await sandbox.exec(command, timeout=_seconds(context)), shown)

    return shell


def _python(shown: int) -> Callable[..., Awaitable[ToolOutput]]:
    async def python(context: ToolContext, code: str) -> ToolOutput:
        """Run Python code in the workspace; print what you want to see."""
        sandbox = _sandbox(context)
        source = code.encode("utf-8", "surrogateescape")
        result = await sandbox.exec(["python3", "-"], stdin=source, timeout=_seconds(context))
        return report(result, shown)

    return python


def _read_file(shown: int) -> Callable[..., Awaitable[ToolOutput]]:
    async def read_file(context: ToolContext, path: str) -> ToolOutput:
        """Read a text file of the workspace."""
        content = await _sandbox(context).read(_relative(path), max_bytes=LARGEST_READ)
        text = decoded(content)
        rest = "read parts with shell: head, tail, sed -n 1,20p"
        return ToolOutput(cut(text, shown, rest) or "(empty file)", {"bytes": len(content)})

    return read_file


async def write_file(context: ToolContext, path: str, content: str) -> ToolOutput:
    """Create or replace a text file in the workspace."""
    data = content.encode("utf-8", "replace")
    await _sandbox(context).write(_relative(path), data)
    return ToolOutput(f"wrote {len(data)} bytes to {_relative(path)}", {"bytes": len(data)})


async def list_files(context: ToolContext, path: str = ".") -> ToolOutput:
    """List files and folders of the workspace."""
    entries = await _sandbox(context).list(_relative(path), max_entries=SHOWN_ENTRIES + 1)
    lines = [_line(entry) for entry in entries[:SHOWN_ENTRIES]]
    if len(entries) > SHOWN_ENTRIES:
        lines.append(f"[more than {SHOWN_ENTRIES} entries; list a folder below]")
    return ToolOutput("\n".join(lines) or "(empty folder)", {"paths": _paths(entries)})


# ---------------------------------------------------------------- what the model reads


def report(result: ExecResult, shown: int) -> ToolOutput:
    """A command's output and how it ended, for the model; the numbers are data for checks."""
    rest = "write output to a file and read parts of it"
    output = decoded(result.stdout) + decoded(result.stderr)
    ending = _ending(result)
    text = cut(output.rstrip("\n"), shown, rest)
    content = "\n".join(part for part in (text, ending) if part) or "(no output)"
    return ToolOutput(
        content,
        {
            "exit_code": result.exit_code,
            "signal": result.signal,
            "timed_out": result.timed_out,
            "oom_killed": result.oom_killed,
            "truncated": result.truncated,
        },
    )


def _ending(result: ExecResult) -> str:
    """How the command ended, where it is worth saying."""
    if result.timed_out:
        return f"[timed out after {result.wall_seconds:.1f} s; everything it started was ended]"
    if result.oom_killed:
        return "[killed: out of memory]"
    if result.signal is not None:
        return f"[killed by signal {result.signal}]"
    if result.exit_code:
        return f"[exit code {result.exit_code}]"
    return "[output was longer than can be kept]" if result.truncated else ""


def cut(text: str, shown: int, rest: str) -> str:
    """At most `shown` characters: head and tail, with a marker between that says where the rest is.

    Two thirds go to the tail, where errors stand.
    """
    if len(text) <= shown:
        return text
    marker = f"\n[… {len(text) - shown} or more characters left out; {rest} …]\n"
    room = max(shown - len(marker), 2)
    head = room // 3
    return text[:head] + marker + text[-(room - head) :]


def decoded(data: bytes) -> str:
    """UTF-8 with replacement characters; NUL, which a database's text cannot hold, is shown as one
    too."""
    return data.decode("utf-8", "replace").replace("\0", "�")


# ---------------------------------------------------------------- arguments


def _sandbox(context: ToolContext) -> Sandbox:
    if context.sandbox is None:
        raise ToolError("this run has no workspace: its domain declares no sandbox")
    return context.sandbox


def _seconds(context: ToolContext) -> float:
    """A call may take what the run has left; the sandbox's own limit applies too."""
    return max(context.seconds_left, 1.0)


def _relative(path: str) -> str:
    """Models like to write /workspace/x for x."""
    if path in (ROOT, f"{ROOT}/"):
        return "."
    return path.removeprefix(f"{ROOT}/") or "."


def _line(entry: FileEntry) -> str:
    name = _shown_name(entry.path)
    match entry.kind:
        case "directory":
            return f"{name}/"
        case "file":
            return f"{name} ({entry.size} bytes)"
        case "link" | "other":
            return f"{name} ({entry.kind}; cannot be read)"


def _paths(entries: list[FileEntry]) -> list[str]:
    return [_shown_name(entry.path) for entry in entries[:SHOWN_ENTRIES]]


def _shown_name(path: str) -> str:
    """A name on one line, without undecodable bytes or control characters."""
    safe = path.encode("utf-8", "replace").decode()
    return safe if safe.isprintable() else ascii(safe)
