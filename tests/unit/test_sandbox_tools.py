"""The sandbox's tools: what the model reads of them."""

import pytest

from runtime.errors import ToolError
from runtime.run import Effect, Json
from runtime.sandbox.protocol import SandboxSpec
from runtime.sandbox.testing import MemoryBackend, MemorySandbox, finished
from runtime.sandbox.tools import SHOWN_CHARACTERS, cut, report, sandbox_tools
from runtime.tools import ToolContext, ToolOutput, ToolRegistry


@pytest.fixture
async def sandbox(memory_sandboxes: MemoryBackend) -> MemorySandbox:
    return await memory_sandboxes.open(SandboxSpec(), files={"a.txt": b"hello\n", "d/b": b"\xff\0"})


async def call(sandbox: MemorySandbox | None, name: str, **arguments: Json) -> ToolOutput:
    tool = ToolRegistry(sandbox_tools()).get(name)
    context = ToolContext(run_id="r", key="k", sandbox=sandbox)
    return await tool(context, tool.validate(arguments))


def test_effects_and_schemas() -> None:
    tools = {tool.name: tool for tool in sandbox_tools()}
    changing = [name for name, tool in tools.items() if tool.effect is Effect.WORKSPACE]
    assert list(tools) == ["shell", "python", "read_file", "write_file", "list_files"]
    assert changing == ["shell", "python", "write_file"]
    assert tools["list_files"].validate({}) == {"path": "."}
    assert tools["shell"].parameters["required"] == ["command"]
    assert all(tool.description for tool in tools.values())


async def test_files_are_read_listed_and_written(sandbox: MemorySandbox) -> None:
    assert (await call(sandbox, "read_file", path="a.txt")).content == "hello\n"
    assert (await call(sandbox, "read_file", path="/workspace/a.txt")).content == "hello\n"
    assert (await call(sandbox, "read_file", path="d/b")).content == "��"
    wrote = await call(sandbox, "write_file", path="/workspace/c", content="é")
    assert wrote.content == "wrote 2 bytes to c"
    assert await sandbox.read("c") == "é".encode()
    listed = await call(sandbox, "list_files", path="/workspace")
    assert listed.content == "a.txt (6 bytes)\nc (2 bytes)\nd/\nd/b (2 bytes)"


async def test_failures_are_content_and_misuse_is_an_error(sandbox: MemorySandbox) -> None:
    failed = await call(sandbox, "shell", command="exit 3")
    assert failed.content == "[exit code 3]"
    assert failed.data["exit_code"] == 3
    with pytest.raises(ToolError, match="does not exist"):
        await call(sandbox, "read_file", path="absent")
    with pytest.raises(ToolError, match="no workspace"):
        await call(None, "shell", command="true")
    with pytest.raises(ToolError, match=r"'\.\.'"):
        await call(sandbox, "write_file", path="/workspace/../x", content="")


async def test_a_call_gets_no_more_time_than_the_run_has(sandbox: MemorySandbox) -> None:
    tool = ToolRegistry(sandbox_tools()).get("shell")
    context = ToolContext(run_id="r", key="k", sandbox=sandbox, seconds_left=5)
    output = await tool(context, {"command": "sleep 20"})
    assert "timed out after 5.0 s" in output.content


def test_long_output_keeps_head_and_tail() -> None:
    text = "first\n" + "x" * 10_000 + "\nError: last"
    shown = cut(text, SHOWN_CHARACTERS, "look elsewhere")
    assert len(shown) <= SHOWN_CHARACTERS
    assert shown.startswith("first\n")
    assert shown.endswith("\nError: last")
    assert "left out; look elsewhere" in shown
    assert cut("short", SHOWN_CHARACTERS, "") == "short"


def test_how_it_ended_survives_the_cut() -> None:
    content = report(finished(1, b"x" * 10_000), SHOWN_CHARACTERS).content
    assert content.endswith("[exit code 1]")
    assert report(finished(), SHOWN_CHARACTERS).content == "(no output)"
    assert report(finished(0, b"a", b"b"), SHOWN_CHARACTERS).content == "ab"


async def test_names_and_output_can_be_stored_anywhere(sandbox: MemorySandbox) -> None:
    await sandbox.write("\udcff", b"")
    await sandbox.write("new\nline", b"")
    listed = await call(sandbox, "list_files")
    listed.content.encode()
    assert "'new\\nline' (0 bytes)" in listed.content.splitlines()
    assert "\0" not in report(finished(0, b"a\0b"), SHOWN_CHARACTERS).content
