"""The contract of every sandbox back end at work: files, commands, snapshots, its end."""

import asyncio
import itertools
import os

from runtime.errors import InputError, SandboxError, ToolError
from runtime.run import SnapshotId
from runtime.sandbox.contract_cases import (
    SMALL,
    Cases,
    alone,
    demand,
    python,
    refuses,
    shell,
    still_works,
)
from runtime.sandbox.protocol import Sandbox, SandboxBackend
from runtime.sandbox.snapshots import digest_of_files

WORK = Cases()

# ---------------------------------------------------------------- files


@WORK.in_sandbox()
async def writes_are_read_back(sandbox: Sandbox) -> None:
    every_byte = bytes(range(256)) * 3
    for content in (b"", b"a\r\nb\r\n", b"\0\xff\xfe", every_byte, b"x" * (1 << 20)):
        await sandbox.write("folder/below/file.bin", content)
        read = await sandbox.read("folder/below/file.bin")
        demand(read == content, "content comes back byte for byte", read[:40])


@WORK.in_sandbox()
async def awkward_names_work(sandbox: Sandbox) -> None:
    names = [
        "with space",
        "new\nline",
        "-rf",
        "ünïcödé/日本",
        "quo'te\"s",
        "a/./b",
        os.fsdecode(b"\xff"),
    ]
    for name in names:
        await sandbox.write(name, name.encode("utf-8", "surrogateescape"))
        read = await sandbox.read(name)
        demand(os.fsdecode(read) == name, "any name works", name)
    listed = {entry.path for entry in await sandbox.list()}
    demand(
        {"with space", "new\nline", "-rf", "a/b"} <= listed, "names are listed as they are", listed
    )


@WORK.in_sandbox()
async def paths_stay_inside(sandbox: Sandbox) -> None:
    for path in ("../x", "a/../../x", "/etc/passwd", "", "a\0b", "x" * 300, "d/" * 200 + "f"):
        await refuses(sandbox.read(path), ToolError, f"reading {path[:20]!r} is refused")
        await refuses(sandbox.write(path, b""), ToolError, f"writing {path[:20]!r} is refused")
        await refuses(sandbox.list(path), ToolError, f"listing {path[:20]!r} is refused")


@WORK.in_sandbox()
async def wrong_kinds_are_refused(sandbox: Sandbox) -> None:
    await sandbox.write("folder/file", b"123456")
    await refuses(sandbox.read("absent"), ToolError, "an absent file is refused")
    await refuses(sandbox.read("folder"), ToolError, "a folder is no file")
    await refuses(sandbox.read("."), ToolError, "the workspace is no file")
    await refuses(sandbox.read("folder/file", max_bytes=5), ToolError, "long files are refused")
    await refuses(sandbox.write("folder", b""), ToolError, "a folder is not replaced")
    await refuses(sandbox.write("folder/file/x", b""), ToolError, "a file is no folder")
    await refuses(sandbox.list("absent"), ToolError, "an absent folder is refused")
    await refuses(sandbox.list("folder/file"), ToolError, "a file is no folder to list")
    demand(await sandbox.read("folder/file", max_bytes=6) == b"123456", "the limit is inclusive")


@WORK.in_sandbox()
async def listings_are_sorted_and_bounded(sandbox: Sandbox) -> None:
    for name in ("b", "a/z", "a.txt", "a/b/c"):
        await sandbox.write(name, name.encode())
    entries = await sandbox.list()
    paths = [entry.path for entry in entries]
    demand(paths == ["a", "a.txt", "a/b", "a/b/c", "a/z", "b"], "sorted by path", paths)
    sizes = {entry.path: (entry.kind, entry.size) for entry in entries}
    demand(sizes["a/z"] == ("file", 3), "kinds and sizes are told", sizes)
    demand([e.path for e in await sandbox.list("a")] == paths[2:5], "folders are listed")
    demand(len(await sandbox.list(max_entries=2)) == 2, "no more than asked for")


@WORK.in_sandbox()
async def a_full_disk_is_the_agents_problem(sandbox: Sandbox) -> None:
    await sandbox.write("kept", b"old")
    too_much = b"x" * (SMALL.disk_bytes + 1)
    await refuses(sandbox.write("kept", too_much), ToolError, "what does not fit is refused")
    demand(await sandbox.read("kept") == b"old", "a refused write changes nothing")
    await still_works(sandbox)


@WORK.in_sandbox("links")
async def links_are_never_followed(sandbox: Sandbox) -> None:
    await sandbox.write("real/file", b"real")
    await shell(sandbox, "ln -s real/file l; ln -s real d; ln -s /etc/passwd p; mkfifo f")
    for path in ("l", "p", "d/file", "f"):
        await refuses(sandbox.read(path), ToolError, f"reading {path} is refused")
        await refuses(sandbox.write(path, b"x"), ToolError, f"writing {path} is refused")
    await refuses(sandbox.list("d"), ToolError, "listing through a link is refused")
    kinds = {entry.path: entry.kind for entry in await sandbox.list()}
    demand((kinds["l"], kinds["f"]) == ("link", "other"), "listings tell what they are", kinds)
    demand(await sandbox.read("real/file") == b"real", "what a link names is unharmed")


@WORK.in_sandbox("shell")
async def permissions_do_not_blind_the_host(sandbox: Sandbox) -> None:
    await sandbox.write("locked/file", b"secret")
    await shell(sandbox, "chmod 0 locked/file locked; chmod 0 .")
    demand(await sandbox.read("locked/file") == b"secret", "files stay readable to the host")
    first = await sandbox.snapshot()
    demand(await sandbox.snapshot() == first, "a snapshot changes nothing")


# ---------------------------------------------------------------- commands


@WORK.in_sandbox()
async def exit_codes_are_exact(sandbox: Sandbox) -> None:
    for words, code in ((["true"], 0), (["false"], 1), ("exit 7", 7), (["no-such-program"], 127)):
        result = await sandbox.exec(words)
        demand(result.exit_code == code, f"{words} ends with {code}", result)
        demand(result.signal is None, "no signal ended it", result)


@WORK.in_sandbox()
async def stdin_and_words_arrive_unchanged(sandbox: Sandbox) -> None:
    data = bytes(range(256)) * 16
    result = await sandbox.exec(["cat"], stdin=data)
    demand(result.stdout == data, "stdin arrives byte for byte", result.stdout[:20])
    result = await sandbox.exec(["echo", "a  b", "$HOME", "*"])
    demand(result.stdout == b"a  b $HOME *\n", "an argv is not read by a shell", result.stdout)


@WORK.in_sandbox()
async def output_is_capped(sandbox: Sandbox) -> None:
    line = b"x" * (SMALL.output_bytes + 1)
    result = await sandbox.exec(["cat"], stdin=line)
    demand(len(result.stdout) == SMALL.output_bytes, "the cap is exact", len(result.stdout))
    demand(result.truncated, "and says so")
    result = await sandbox.exec(["cat"], stdin=line[:-1])
    demand(not result.truncated, "output that fits is whole")


@WORK.in_sandbox()
async def time_outs_are_data(sandbox: Sandbox) -> None:
    result = await sandbox.exec(["sleep", "60"], timeout=0.2)
    demand(result.timed_out and result.exit_code is None, "a time-out is told", result)
    await still_works(sandbox)


@WORK.in_sandbox()
async def calls_take_turns(sandbox: Sandbox) -> None:
    calls = [sandbox.exec(["echo", str(number)]) for number in range(5)]
    results = await asyncio.gather(*calls)
    printed = [int(result.stdout) for result in results]
    demand(printed == list(range(5)), "each call gets its own answer", printed)


@WORK.in_sandbox("shell")
async def commands_run_where_and_with_what_is_asked(sandbox: Sandbox) -> None:
    await sandbox.write("below/x", b"")
    result = await sandbox.exec('pwd; echo "$A"', cwd="below", env={"A": "a=b c"})
    demand(result.stdout == b"/workspace/below\na=b c\n", "folder and variables are set", result)
    await refuses(sandbox.exec("true", cwd="absent"), ToolError, "an absent folder is refused")
    await refuses(sandbox.exec("true", cwd=".."), ToolError, "a folder outside is refused")
    for bad in ({"A=B": "x"}, {"": "x"}, {"A": "a\0b"}):
        await refuses(sandbox.exec("true", env=bad), ToolError, "bad variables are refused")
    await refuses(sandbox.exec(["echo", "a\0b"]), ToolError, "words with NUL are refused")
    await refuses(sandbox.exec([]), ToolError, "no command is refused")


@WORK.in_sandbox("shell")
async def signals_are_exact(sandbox: Sandbox) -> None:
    result = await shell(sandbox, "kill -TERM $$")
    demand((result.exit_code, result.signal) == (None, 15), "a signal is told", result)
    result = await shell(sandbox, "sh -c 'kill -KILL $$'; exit 3")
    demand(result.exit_code == 3, "a child's signal is the child's", result)


@WORK.in_sandbox("shell")
async def streams_are_apart(sandbox: Sandbox) -> None:
    result = await shell(sandbox, "echo out; echo err >&2; printf '\\377\\000'")
    demand(result.stdout == b"out\n\xff\0", "stdout is stdout, undecoded", result)
    demand(result.stderr == b"err\n", "stderr is stderr", result)


@WORK.in_sandbox("shell")
async def python_is_there(sandbox: Sandbox) -> None:
    result = await python(sandbox, "import json, sqlite3, ctypes; print(6 * 7)")
    demand(result.stdout == b"42\n", "python3 runs", result)


@WORK.in_sandbox("background")
async def nothing_outlives_its_call(sandbox: Sandbox) -> None:
    daemon = "(setsid sh -c 'sleep 1; echo late > late' &) ; sleep 300 & echo started"
    result = await shell(sandbox, daemon)
    demand(result.stdout == b"started\n", "background children do not hold the call", result)
    await alone(sandbox)
    result = await shell(sandbox, "trap '' TERM INT HUP; setsid sleep 300 & sleep 300", timeout=0.2)
    demand(result.timed_out, "the call is ended", result)
    await alone(sandbox)


# ---------------------------------------------------------------- snapshots


@WORK.of_backend()
async def files_at_opening_are_there(backend: SandboxBackend) -> None:
    files = {"a": b"1", "b/c/d": b"\0", "b/e f": b"", "-x": b"2"}
    sandbox = await backend.open(SMALL, files=files)
    try:
        for path, content in files.items():
            demand(await sandbox.read(path) == content, "given files are there", path)
        snapshot = await sandbox.snapshot()
    finally:
        await sandbox.close()
    demand(snapshot == digest_of_files(files), "its id is known without a sandbox", snapshot)
    demand(await backend.store(files) == snapshot, "and what `store` says", snapshot)
    demand(await backend.read_snapshot(snapshot) == files, "its files come back")


@WORK.of_backend()
async def bad_files_are_refused_at_opening(backend: SandboxBackend) -> None:
    for files in (
        {"../x": b""},
        {"/x": b""},
        {"": b""},
        {".": b""},
        {"a": b"", "a/b": b""},
        {"a": b"", "./a": b""},
        {"big": b"x" * (SMALL.disk_bytes + 1)},
    ):
        await refuses(backend.open(SMALL, files=files), InputError, f"{list(files)} is refused")


@WORK.of_backend()
async def a_workspace_can_be_resumed(backend: SandboxBackend) -> None:
    sandbox = await backend.open(SMALL, files={"kept": b"1", "changed": b"1"})
    await sandbox.write("changed", b"2")
    await sandbox.write("new/file", b"3")
    snapshot = await sandbox.snapshot()
    demand(await sandbox.snapshot() == snapshot, "an unchanged tree keeps its id")
    await sandbox.write("later", b"4")
    demand(await sandbox.snapshot() != snapshot, "a changed tree gets another")
    await sandbox.close()
    again = await backend.open(SMALL, snapshot=snapshot, files={"kept": b"9"})
    try:
        expected = {"kept": b"9", "changed": b"2", "new/file": b"3"}
        listed = [e.path for e in await again.list() if e.kind == "file"]
        demand(listed == sorted(expected), "the same files, no more", listed)
        for path, content in expected.items():
            demand(await again.read(path) == content, "with the same content", path)
    finally:
        await again.close()


@WORK.of_backend("shell", "links", "empty_folders")
async def a_snapshot_keeps_the_whole_tree(backend: SandboxBackend) -> None:
    sandbox = await backend.open(SMALL)
    await shell(
        sandbox,
        "mkdir -p empty closed/in && echo x > closed/in/f;"
        "chmod 555 closed/in && chmod 500 closed;"
        "echo run > tool && chmod 755 tool; ln -s tool link; ln -s /etc/passwd out; mkfifo pipe;"
        "printf 'n' > $(printf 'odd\\377name'); chmod 0 tool",
    )
    snapshot = await sandbox.snapshot()
    await sandbox.close()
    again = await backend.open(SMALL, snapshot=snapshot)
    try:
        demand(await again.snapshot() == snapshot, "opening it gives the same tree")
        result = await shell(again, "readlink link out; ls -d empty; stat -c %a closed closed/in")
        seen = result.stdout.split()
        expected = [b"tool", b"/etc/passwd", b"empty", b"500", b"555"]
        demand(seen == expected, "links, folders and modes are kept", seen)
    finally:
        await again.close()
    files = await backend.read_snapshot(snapshot)
    demand(set(files) == {"closed/in/f", "tool", os.fsdecode(b"odd\xffname")}, "files only", files)


@WORK.of_backend()
async def unknown_snapshots_are_refused(backend: SandboxBackend) -> None:
    for name in (f"sha256:{'0' * 64}", "sha256:../../etc/passwd", "latest", f"sha256:{'Z' * 64}"):
        snapshot = SnapshotId(name)
        await refuses(backend.open(SMALL, snapshot=snapshot), SandboxError, f"{name} is refused")
        await refuses(backend.read_snapshot(snapshot), SandboxError, f"{name} is refused")


# ---------------------------------------------------------------- life


@WORK.of_backend()
async def closing_is_final_and_idempotent(backend: SandboxBackend) -> None:
    sandbox = await backend.open(SMALL)
    await sandbox.close()
    await sandbox.close()
    await refuses(sandbox.exec(["true"]), SandboxError, "a closed sandbox refuses commands")
    await refuses(sandbox.read("x"), SandboxError, "a closed sandbox refuses reads")
    await refuses(sandbox.snapshot(), SandboxError, "a closed sandbox refuses snapshots")


@WORK.of_backend("background")
async def a_running_call_does_not_hold_up_closing(backend: SandboxBackend) -> None:
    sandbox = await backend.open(SMALL)
    await sandbox.exec(["true"])
    call = asyncio.ensure_future(sandbox.exec(["sleep", "60"]))
    for _ in itertools.repeat(None, 5):
        await asyncio.sleep(0)
    await sandbox.close()
    await refuses(call, SandboxError, "the call is told that its sandbox is gone")
