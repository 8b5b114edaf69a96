"""The contract of every sandbox back end under attack: limits and isolation.

Every attack is bounded by the limit it tests and by the time-out of its call. Attacks on the helper
itself are in `contract_helper.py`.
"""

import socket
from pathlib import Path
from tempfile import TemporaryDirectory

from runtime.errors import ToolError
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

HOSTILE = Cases()

# ---------------------------------------------------------------- limits


@HOSTILE.in_sandbox("limits")
async def a_flood_is_read_and_dropped(sandbox: Sandbox) -> None:
    result = await shell(sandbox, "yes | head -c 50000000; echo end >&2")
    demand(
        result.exit_code == 0 and result.stderr == b"end\n", "a flood blocks nobody", result.stderr
    )
    demand(len(result.stdout) == SMALL.output_bytes, "and is cut", len(result.stdout))


@HOSTILE.in_sandbox("limits")
async def a_fork_bomb_is_contained(sandbox: Sandbox) -> None:
    bomb = "f() { f | f & }; f; sleep 60"
    result = await shell(sandbox, bomb, timeout=1.0)
    demand(result.timed_out or result.exit_code != 0, "the bomb ends", result)
    await still_works(sandbox)
    await alone(sandbox)


@HOSTILE.in_sandbox("limits")
async def processes_are_counted(sandbox: Sandbox) -> None:
    many = "for i in $(seq 40); do sleep 30 & done 2>/dev/null; ls -d /proc/[0-9]* | wc -l"
    result = await shell(sandbox, many, timeout=5)
    counted = result.stdout.split()
    demand(not counted or int(counted[0]) <= SMALL.processes + 2, "processes are capped", result)
    await still_works(sandbox)


@HOSTILE.in_sandbox("limits")
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


@HOSTILE.in_sandbox("limits")
async def memory_is_summed_over_processes(sandbox: Sandbox) -> None:
    result = await python(sandbox, MANY_HOGS, timeout=10)
    demand(result.oom_killed, "many processes share one limit", result)
    await still_works(sandbox)


@HOSTILE.in_sandbox("limits")
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


@HOSTILE.in_sandbox("limits")
async def a_deep_tree_is_refused(sandbox: Sandbox) -> None:
    code = "import os\nfor _ in range(200): os.mkdir('d'); os.chdir('d')"
    await python(sandbox, code)
    await refuses(sandbox.snapshot(), ToolError, "a tree too deep is refused")
    await shell(sandbox, "rm -r d")
    await sandbox.snapshot()


MANY_FILES = """
files = []
try:
    while True:
        files.append(open("/dev/null"))
except OSError:
    print(len(files))
"""


@HOSTILE.in_sandbox("limits")
async def open_files_are_capped(sandbox: Sandbox) -> None:
    result = await python(sandbox, MANY_FILES)
    demand(0 < int(result.stdout) <= SMALL.open_files, "descriptors are capped", result)


# ---------------------------------------------------------------- isolation


@HOSTILE.in_sandbox("environment")
async def the_environment_is_the_declared_one(sandbox: Sandbox) -> None:
    result = await sandbox.exec(["env"])
    allowed = {"PATH", "HOME", "USER", "LANG", "TZ", "PYTHONDONTWRITEBYTECODE", "LD_LIBRARY_PATH"}
    seen = {line.partition(b"=")[0].decode() for line in result.stdout.splitlines()}
    demand(seen <= allowed, "nothing of the host's environment is visible", seen)


@HOSTILE.of_backend("isolation")
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


@HOSTILE.of_backend("isolation")
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


@HOSTILE.of_backend("isolation")
async def sandboxes_do_not_see_each_other(backend: SandboxBackend) -> None:
    one, two = await backend.open(SMALL), await backend.open(SMALL)
    try:
        await shell(one, "echo secret > x; echo secret > /tmp/x; echo secret > /dev/shm/x")
        result = await shell(two, "cat x /tmp/x /dev/shm/x; ls /proc")
        demand(b"secret" not in result.stdout, "each has its own files", result)
    finally:
        await one.close()
        await two.close()


@HOSTILE.in_sandbox("isolation")
async def the_root_is_read_only(sandbox: Sandbox) -> None:
    places = "/x /usr/x /usr/bin/x /etc/x /dev/x /opt/x /opt/python/x /opt/noria/x /proc/sys/x"
    result = await shell(sandbox, f"for p in {places}; do (: > $p) 2>/dev/null && echo $p; done")
    demand(result.stdout == b"", "only the workspace and /tmp can be written", result.stdout)


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


@HOSTILE.in_sandbox("isolation")
async def kernel_doors_are_shut(sandbox: Sandbox) -> None:
    result = await python(sandbox, FORBIDDEN)
    demand(result.stdout == b"done\n", "forbidden calls fail, ordinary ones work", result)


@HOSTILE.in_sandbox("isolation")
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
