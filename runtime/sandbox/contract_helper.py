"""The contract of every sandbox back end whose commands attack what watches over them.

A command that could starve, slow or end the helper of its sandbox would turn its own failure into
an infrastructure error, which is never graded. Whatever it tries, the sandbox must go on.
"""

from runtime.sandbox.contract_cases import Cases, demand, python, shell, still_works
from runtime.sandbox.protocol import Sandbox

AGAINST_THE_HELPER = Cases()


@AGAINST_THE_HELPER.in_sandbox("isolation")
async def the_helper_is_out_of_reach(sandbox: Sandbox) -> None:
    script = (
        "cat /proc/1/environ /proc/1/mem /proc/1/maps; ls /proc/1/fd; kill -9 1; ls /proc/self/fd"
    )
    result = await shell(sandbox, script)
    demand(result.stdout.split() == [b"0", b"1", b"2", b"3"], "nothing of it is open", result)
    await still_works(sandbox)


EVERY_SIGNAL = """
import os
for number in range(1, 65):
    try:
        os.kill(1, number)
    except OSError:
        pass
"""


@AGAINST_THE_HELPER.in_sandbox("isolation")
async def no_signal_reaches_the_helper(sandbox: Sandbox) -> None:
    await python(sandbox, EVERY_SIGNAL)
    await still_works(sandbox)


ATTEMPT = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def attempt(name, number, *arguments):
    if libc.syscall(number, *arguments) != -1:
        print("allowed", name)
"""
OTHERS_SETTINGS = f"""{ATTEMPT}
import resource
WIDE = 1 << 32
def wide(value):
    return ctypes.c_ulong(WIDE | value)
one = (ctypes.c_ulong * 2)(1, 1)
zero = ctypes.byref(ctypes.c_int(0))
for limit in ("NOFILE", "NPROC", "AS", "FSIZE", "CPU", "DATA"):
    for pid in (1, os.getppid(), wide(1)):
        attempt(f"limiting {{limit}}", 302, pid, getattr(resource, f"RLIMIT_{{limit}}"), one, None)
for pid in (1, wide(1)):
    attempt("sched_setparam", 142, pid, zero)
    attempt("sched_setscheduler", 144, pid, 5, zero)
    attempt("sched_setaffinity", 203, pid, 8, ctypes.byref(ctypes.c_ulong(1)))
    attempt("sched_setattr", 314, pid, (ctypes.c_uint * 12)(48, 5), 0)
    attempt("setpriority process", 141, 0, pid, 19)
    attempt("ioprio_set process", 251, 1, pid, 3 << 13)
for which in (2, wide(2)):
    attempt("setpriority user", 141, which, 0, 19)
    attempt("setpriority this user", 141, which, os.getuid(), 19)
for which in (3, wide(3)):
    attempt("ioprio_set user", 251, which, 0, 3 << 13)
attempt("setpriority group", 141, 1, 1, 19)
attempt("ioprio_set group", 251, 2, 1, 3 << 13)
"""
OWN_SETTINGS = """
files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (files - 1, most))
assert resource.prlimit(0, resource.RLIMIT_NOFILE) == (files - 1, most)
os.sched_setaffinity(0, os.sched_getaffinity(0))
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
os.setpriority(os.PRIO_PROCESS, 0, 1)
os.nice(1)
print(os.getpriority(os.PRIO_PROCESS, 0), "done")
"""


@AGAINST_THE_HELPER.in_sandbox("isolation")
async def only_own_settings_can_be_changed(sandbox: Sandbox) -> None:
    result = await python(sandbox, OTHERS_SETTINGS + OWN_SETTINGS)
    demand(result.stdout == b"2 done\n", "a process changes its own settings alone", result)
    await sandbox.write("x", b"x" * 10_000)
    await sandbox.snapshot()
    await still_works(sandbox)


OUTLIVING = f"""{ATTEMPT}
CREATE = 0o1600
attempt("shmget", 29, 0, 1 << 20, CREATE)
attempt("semget", 64, 0, 1, CREATE)
attempt("msgget", 68, 0, CREATE)
attempt("mq_open", 240, b"queue", 0o102, 0o600, None)
print("done")
"""


@AGAINST_THE_HELPER.in_sandbox("isolation")
async def nothing_in_the_kernel_outlives_a_call(sandbox: Sandbox) -> None:
    """Shared memory, semaphores and queues stay after their makers, and take memory."""
    result = await python(sandbox, OUTLIVING)
    demand(result.stdout == b"done\n", "there is no IPC of System V, no message queue", result)


OTHER_ABI = f"""{ATTEMPT}
if os.fork() == 0:
    attempt("getpid of x32", (1 << 30) | 39)
    os._exit(0)
os.wait()
print("done")
"""


@AGAINST_THE_HELPER.in_sandbox("isolation")
async def the_filter_cannot_be_passed_by_another_abi(sandbox: Sandbox) -> None:
    result = await python(sandbox, OTHER_ABI)
    demand(result.stdout == b"done\n", "calls of the x32 ABI fail or kill", result)


@AGAINST_THE_HELPER.in_sandbox("limits")
async def commands_are_offered_to_the_oom_killer(sandbox: Sandbox) -> None:
    result = await shell(sandbox, "cat /proc/self/oom_score_adj")
    demand(result.stdout == b"1000\n", "the kernel's first choice is a command", result)


CROWD = '''
import fcntl, os
for name in ("oom_score_adj", "oom_adj"):
    try:
        with open(f"/proc/self/{name}", "w") as score:
            score.write("0")
    except OSError:
        pass
for _ in range(60):
    back, front = os.pipe()
    fcntl.fcntl(front, fcntl.F_SETPIPE_SZ, 1 << 20)
    os.set_inheritable(back, True)
    os.write(front, bytes(1 << 20))
os.execlp("sh", "sh", "-c", """
mkfifo p
for i in $(seq 13); do dd if=/dev/zero bs=5M of=p & done 2>/dev/null
exec sleep 60 < p
""")
'''
"""Memory that is no process's own (full pipes), then many processes each smaller than the helper:
where a command can refuse to be the kernel's choice, the helper is the largest."""


@AGAINST_THE_HELPER.in_sandbox("limits")
async def commands_die_of_memory_before_the_helper(sandbox: Sandbox) -> None:
    await python(sandbox, CROWD, timeout=2)
    await still_works(sandbox)
