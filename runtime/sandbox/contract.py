"""The contract of every sandbox back end, as cases that a test runner or `doctor` can call.

A case is an async function of a back end that raises `ContractBroken` where the back end does not
keep what the protocol promises. `needs` names the features it uses; a back end that lists one of
them in `unsupported` (fakes only) is excused. Sizes and times are small: the hostile cases are
bounded by the limits they test, and by the time-out of the call.
"""

import asyncio
import itertools
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from runtime.errors import InputError, NoriaError, SandboxError, ToolError
from runtime.run import SnapshotId
from runtime.sandbox.protocol import ExecResult, Sandbox, SandboxBackend, SandboxSpec
from runtime.sandbox.snapshots import digest_of_files

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


CONTRACT: list[Case] = []

InSandbox = Callable[[Sandbox], Awaitable[None]]


def _case(*needs: str) -> Callable[[InSandbox], InSandbox]:
    """Register a check that wants one small sandbox."""

    def register(check: InSandbox) -> InSandbox:
        async def run(backend: SandboxBackend) -> None:
            sandbox = await backend.open(SMALL)
            try:
                await check(sandbox)
            finally:
                await sandbox.close()

        CONTRACT.append(Case(check.__name__, frozenset(needs), run))
        return check

    return register


OfBackend = Callable[[SandboxBackend], Awaitable[None]]


def _backend_case(*needs: str) -> Callable[[OfBackend], OfBackend]:
    """Register a check that opens its own sandboxes."""

    def register(check: OfBackend) -> OfBackend:
        CONTRACT.append(Case(check.__name__, frozenset(needs), check))
        return check

    return register


# ---------------------------------------------------------------- saying what is wrong


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


# ---------------------------------------------------------------- files


@_case()
async def writes_are_read_back(sandbox: Sandbox) -> None:
    every_byte = bytes(range(256)) * 3
    for content in (b"", b"a\r\nb\r\n", b"\0\xff\xfe", every_byte, b"x" * (1 << 20)):
        await sandbox.write("folder/below/file.bin", content)
        read = await sandbox.read("folder/below/file.bin")
        demand(read == content, "content comes back byte for byte", read[:40])


@_case()
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


@_case()
async def paths_stay_inside(sandbox: Sandbox) -> None:
    for path in ("../x", "a/../../x", "/etc/passwd", "", "a\0b", "x" * 300, "d/" * 200 + "f"):
        await refuses(sandbox.read(path), ToolError, f"reading {path[:20]!r} is refused")
        await refuses(sandbox.write(path, b""), ToolError, f"writing {path[:20]!r} is refused")
        await refuses(sandbox.list(path), ToolError, f"listing {path[:20]!r} is refused")


@_case()
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


@_case()
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


@_case()
async def a_full_disk_is_the_agents_problem(sandbox: Sandbox) -> None:
    await sandbox.write("kept", b"old")
    too_much = b"x" * (SMALL.disk_bytes + 1)
    await refuses(sandbox.write("kept", too_much), ToolError, "what does not fit is refused")
    demand(await sandbox.read("kept") == b"old", "a refused write changes nothing")
    await still_works(sandbox)


@_case("links")
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


@_case("shell")
async def permissions_do_not_blind_the_host(sandbox: Sandbox) -> None:
    await sandbox.write("locked/file", b"secret")
    await shell(sandbox, "chmod 0 locked/file locked; chmod 0 .")
    demand(await sandbox.read("locked/file") == b"secret", "files stay readable to the host")
    first = await sandbox.snapshot()
    demand(await sandbox.snapshot() == first, "a snapshot changes nothing")


# ---------------------------------------------------------------- commands


@_case()
async def exit_codes_are_exact(sandbox: Sandbox) -> None:
    for words, code in ((["true"], 0), (["false"], 1), ("exit 7", 7), (["no-such-program"], 127)):
        result = await sandbox.exec(words)
        demand(result.exit_code == code, f"{words} ends with {code}", result)
        demand(result.signal is None, "no signal ended it", result)


@_case()
async def stdin_and_words_arrive_unchanged(sandbox: Sandbox) -> None:
    data = bytes(range(256)) * 16
    result = await sandbox.exec(["cat"], stdin=data)
    demand(result.stdout == data, "stdin arrives byte for byte", result.stdout[:20])
    result = await sandbox.exec(["echo", "a  b", "$HOME", "*"])
    demand(result.stdout == b"a  b $HOME *\n", "an argv is not read by a shell", result.stdout)


@_case()
async def output_is_capped(sandbox: Sandbox) -> None:
    line = b"x" * (SMALL.output_bytes + 1)
    result = await sandbox.exec(["cat"], stdin=line)
    demand(len(result.stdout) == SMALL.output_bytes, "the cap is exact", len(result.stdout))
    demand(result.truncated, "and says so")
    result = await sandbox.exec(["cat"], stdin=line[:-1])
    demand(not result.truncated, "output that fits is whole")


@_case()
async def time_outs_are_data(sandbox: Sandbox) -> None:
    result = await sandbox.exec(["sleep", "60"], timeout=0.2)
    demand(result.timed_out and result.exit_code is None, "a time-out is told", result)
    await still_works(sandbox)


@_case()
async def calls_take_turns(sandbox: Sandbox) -> None:
    calls = [sandbox.exec(["echo", str(number)]) for number in range(5)]
    results = await asyncio.gather(*calls)
    printed = [int(result.stdout) for result in results]
    demand(printed == list(range(5)), "each call gets its own answer", printed)


@_case("shell")
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


@_case("shell")
async def signals_are_exact(sandbox: Sandbox) -> None:
    result = await shell(sandbox, "kill -TERM $$")
    demand((result.exit_code, result.signal) == (None, 15), "a signal is told", result)
    result = await shell(sandbox, "sh -c 'kill -KILL $$'; exit 3")
    demand(result.exit_code == 3, "a child's signal is the child's", result)


@_case("shell")
async def streams_are_apart(sandbox: Sandbox) -> None:
    result = await shell(sandbox, "echo out; echo err >&2; printf '\\377\\000'")
    demand(result.stdout == b"out\n\xff\0", "stdout is stdout, undecoded", result)
    demand(result.stderr == b"err\n", "stderr is stderr", result)


@_case("shell")
async def python_is_there(sandbox: Sandbox) -> None:
    result = await python(sandbox, "import json, sqlite3, ctypes; print(6 * 7)")
    demand(result.stdout == b"42\n", "python3 runs", result)


@_case("background")
async def nothing_outlives_its_call(sandbox: Sandbox) -> None:
    daemon = "(setsid sh -c 'sleep 1; echo late > late' &) ; sleep 300 & echo started"
    result = await shell(sandbox, daemon)
    demand(result.stdout == b"started\n", "background children do not hold the call", result)
    await alone(sandbox)
    result = await shell(sandbox, "trap '' TERM INT HUP; setsid sleep 300 & sleep 300", timeout=0.2)
    demand(result.timed_out, "the call is ended", result)
    await alone(sandbox)


# ---------------------------------------------------------------- limits


@_case("limits")
async def a_flood_is_read_and_dropped(sandbox: Sandbox) -> None:
    result = await shell(sandbox, "yes | head -c 50000000; echo end >&2")
    demand(
        result.exit_code == 0 and result.stderr == b"end\n", "a flood blocks nobody", result.stderr
    )
    demand(len(result.stdout) == SMALL.output_bytes, "and is cut", len(result.stdout))


@_case("limits")
async def a_fork_bomb_is_contained(sandbox: Sandbox) -> None:
    bomb = "f() { f | f & }; f; sleep 60"
    result = await shell(sandbox, bomb, timeout=1.0)
    demand(result.timed_out or result.exit_code != 0, "the bomb ends", result)
    await still_works(sandbox)
    await alone(sandbox)


@_case("limits")
async def processes_are_counted(sandbox: Sandbox) -> None:
    many = "for i in $(seq 40); do sleep 30 & done 2>/dev/null; ls -d /proc/[0-9]* | wc -l"
    result = await shell(sandbox, many, timeout=5)
    counted = result.stdout.split()
    demand(not counted or int(counted[0]) <= SMALL.processes + 2, "processes are capped", result)
    await still_works(sandbox)


@_case("limits")
async def a_memory_hog_is_contained(sandbox: Sandbox) -> None:
    hog = "blocks = []\nwhile True: blocks.append(bytearray(1 << 20))"
    result = await python(sandbox, hog, timeout=20)
    demand(not result.timed_out and result.exit_code != 0, "the hog ends", result)
    demand(
        result.oom_killed or b"MemoryError" in result.stderr, "and it is told why", result.stderr
    )
    await still_works(sandbox)


MANY_HOGS = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        block = bytearray(b"x") * (40 << 20)
        time.sleep(60)
os.wait()
"""
"""240 MiB in six processes; ends only when one of them is killed."""


@_case("limits")
async def memory_is_summed_over_processes(sandbox: Sandbox) -> None:
    result = await python(sandbox, MANY_HOGS, timeout=10)
    demand(result.oom_killed, "many processes share one limit", result)
    await still_works(sandbox)


@_case("limits")
async def disk_and_inodes_are_capped(sandbox: Sandbox) -> None:
    result = await shell(sandbox, "head -c 8000000 /dev/zero > big; stat -c %s big")
    demand(int(result.stdout) <= SMALL.disk_bytes, "the disk is full when it is full", result)
    result = await shell(sandbox, "rm big; for i in $(seq 400); do : > f$i || exit 9; done")
    demand(result.exit_code != 0, "files are counted", result)
    result = await shell(sandbox, "rm -f f*; truncate -s 100G sparse")
    demand(result.exit_code != 0, "a sparse file cannot claim more", result)
    result = await shell(sandbox, "head -c 900000000 /dev/zero > /tmp/big; stat -c %s /tmp/big")
    demand(int(result.stdout) <= SMALL.memory_bytes, "/tmp is capped", result)
    await still_works(sandbox)


@_case("limits")
async def a_deep_tree_is_refused(sandbox: Sandbox) -> None:
    code = "import os\nfor _ in range(200): os.mkdir('d'); os.chdir('d')"
    await python(sandbox, code)
    await refuses(sandbox.snapshot(), ToolError, "a tree too deep is refused")
    await shell(sandbox, "rm -r d")
    await sandbox.snapshot()


@_case("limits")
async def open_files_are_capped(sandbox: Sandbox) -> None:
    code = "files = []\nwhile True: files.append(open('/dev/null'))"
    result = await python(sandbox, code)
    demand(b"Too many open files" in result.stderr, "descriptors are capped", result.stderr[-200:])


# ---------------------------------------------------------------- isolation


@_case("environment")
async def the_environment_is_the_declared_one(sandbox: Sandbox) -> None:
    result = await sandbox.exec(["env"])
    allowed = {"PATH", "HOME", "USER", "LANG", "TZ", "PYTHONDONTWRITEBYTECODE", "LD_LIBRARY_PATH"}
    seen = {line.partition(b"=")[0].decode() for line in result.stdout.splitlines()}
    demand(seen <= allowed, "nothing of the host's environment is visible", seen)


@_backend_case("isolation")
async def host_files_are_absent(backend: SandboxBackend) -> None:
    sandbox = await backend.open(SMALL)
    try:
        with TemporaryDirectory(prefix="noria-canary-") as folder:
            canary = Path(folder) / "canary"
            canary.write_text("canary")
            paths = [str(canary), __file__, "/etc/shadow", "/root", "/home", "/sys", "/var"]
            result = await sandbox.exec(["ls", "-d", *paths])
            demand(result.stdout == b"", "no host file is visible", result.stdout)
    finally:
        await sandbox.close()


@_backend_case("isolation")
async def the_host_cannot_be_reached(backend: SandboxBackend) -> None:
    sandbox = await backend.open(SMALL)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"""
import socket
for address in (("127.0.0.1", {port}), ("169.254.169.254", 80), ("192.0.2.1", 53)):
    try:
        socket.create_connection(address, 2)
        print("connected", address)
    except OSError:
        pass
print([line.split(":")[0].strip() for line in open("/proc/net/dev") if ":" in line])
"""
        result = await python(sandbox, code)
    await sandbox.close()
    demand(result.stdout == b"['lo']\n", "no address answers, the host's loopback neither", result)


@_backend_case("isolation")
async def sandboxes_do_not_see_each_other(backend: SandboxBackend) -> None:
    one, two = await backend.open(SMALL), await backend.open(SMALL)
    try:
        await shell(one, "echo secret > x; echo secret > /tmp/x; echo secret > /dev/shm/x")
        result = await shell(two, "cat x /tmp/x /dev/shm/x; ls /proc")
        demand(b"secret" not in result.stdout, "each has its own files", result)
    finally:
        await one.close()
        await two.close()


@_case("isolation")
async def the_root_is_read_only(sandbox: Sandbox) -> None:
    places = "/x /usr/x /usr/bin/x /etc/x /dev/x /opt/x /opt/python/x /opt/noria/x /proc/sys/x"
    result = await shell(sandbox, f"for p in {places}; do (: > $p) 2>/dev/null && echo $p; done")
    demand(result.stdout == b"", "only the workspace and /tmp can be written", result.stdout)


@_case("isolation")
async def the_helper_is_out_of_reach(sandbox: Sandbox) -> None:
    script = (
        "cat /proc/1/environ /proc/1/mem /proc/1/maps; ls /proc/1/fd; kill -9 1; ls /proc/self/fd"
    )
    result = await shell(sandbox, script)
    demand(result.stdout.split() == [b"0", b"1", b"2", b"3"], "nothing of it is open", result)
    await still_works(sandbox)


FORBIDDEN = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def attempt(name, number, *arguments):
    if libc.syscall(number, *arguments) != -1:
        print("allowed", name)
attempt("ptrace", 101, 16, os.getppid(), 0, 0)
attempt("personality", 135, 0x0008)
attempt("mount", 165, b"none", b"/tmp", b"tmpfs", 0, 0)
attempt("umount2", 166, b"/tmp", 0)
attempt("pivot_root", 155, b"/tmp", b"/tmp")
attempt("chroot", 161, b"/tmp")
attempt("add_key", 248, b"user", b"k", b"v", 1, -3)
attempt("keyctl", 250, 0, -3, 1)
attempt("unshare user", 272, 0x10000000)
attempt("clone user", 56, 0x10000011, 0, 0, 0, 0)
attempt("setns", 308, 0, 0)
attempt("bpf", 321, 0, 0, 0)
attempt("userfaultfd", 323, 0)
attempt("io_uring_setup", 425, 1, 0)
attempt("open_tree", 428, -100, b"/", 1)
attempt("fsopen", 430, b"tmpfs", 0)
attempt("process_vm_readv", 310, 1, 0, 0, 0, 0, 0)
attempt("perf_event_open", 298, 0, 0, -1, -1, 0)
attempt("tiocsti", 16, 0, 0x5412, b"x")
for family in (16, 17, 38, 40):
    attempt(f"socket {family}", 41, family, 3, 0)
attempt("socketpair netlink", 53, 16, 3, 0, (ctypes.c_int * 2)())
if os.fork() == 0:
    os._exit(0)
os.wait()
print("done")
"""


@_case("isolation")
async def kernel_doors_are_shut(sandbox: Sandbox) -> None:
    result = await python(sandbox, FORBIDDEN)
    demand(result.stdout == b"done\n", "forbidden calls fail, ordinary ones work", result)


@_case("isolation")
async def there_is_no_privilege(sandbox: Sandbox) -> None:
    result = await shell(
        sandbox, "grep -E '^(CapEff|CapPrm|CapBnd|NoNewPrivs|Seccomp):' /proc/self/status"
    )
    seen = dict(line.split(b":\t") for line in result.stdout.splitlines())
    demand(int(seen[b"CapEff"], 16) == int(seen[b"CapPrm"], 16) == 0, "no capability", seen)
    demand(seen[b"NoNewPrivs"] == b"1", "setuid programs gain nothing", seen)
    demand(seen[b"Seccomp"] == b"2", "system calls are filtered", seen)
    result = await sandbox.exec(["id", "-u"])
    demand(result.stdout.strip() != b"0", "the user is not root", result)


# ---------------------------------------------------------------- snapshots


@_backend_case()
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


@_backend_case()
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


@_backend_case()
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


@_backend_case("shell", "links", "empty_folders")
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


@_backend_case()
async def unknown_snapshots_are_refused(backend: SandboxBackend) -> None:
    for name in (f"sha256:{'0' * 64}", "sha256:../../etc/passwd", "latest", f"sha256:{'Z' * 64}"):
        snapshot = SnapshotId(name)
        await refuses(backend.open(SMALL, snapshot=snapshot), SandboxError, f"{name} is refused")
        await refuses(backend.read_snapshot(snapshot), SandboxError, f"{name} is refused")


# ---------------------------------------------------------------- life


@_backend_case()
async def closing_is_final_and_idempotent(backend: SandboxBackend) -> None:
    sandbox = await backend.open(SMALL)
    await sandbox.close()
    await sandbox.close()
    await refuses(sandbox.exec(["true"]), SandboxError, "a closed sandbox refuses commands")
    await refuses(sandbox.read("x"), SandboxError, "a closed sandbox refuses reads")
    await refuses(sandbox.snapshot(), SandboxError, "a closed sandbox refuses snapshots")


@_backend_case("background")
async def a_running_call_does_not_hold_up_closing(backend: SandboxBackend) -> None:
    sandbox = await backend.open(SMALL)
    await sandbox.exec(["true"])
    call = asyncio.ensure_future(sandbox.exec(["sleep", "60"]))
    for _ in itertools.repeat(None, 5):
        await asyncio.sleep(0)
    await sandbox.close()
    await refuses(call, SandboxError, "the call is told that its sandbox is gone")
