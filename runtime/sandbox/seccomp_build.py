"""Builds the shipped system-call filter: `python -m runtime.sandbox.seccomp_build`.

A development tool: it needs `pyseccomp` and the system's libseccomp, and writes
`seccomp_x86_64.bpf` beside itself. The bytes are committed, so that no host needs either. What is
not listed is allowed: the filter closes the parts of the kernel an unprivileged program in a
namespace has no business in (they are where escapes come from), and leaves the rest to namespaces,
missing capabilities and read-only mounts. Calls of the 32-bit and x32 ABIs kill the process.

Another architecture is another run of this file on it; `profile.py` picks the file by machine name.
"""

import importlib
from pathlib import Path
from typing import Any

seccomp: Any = importlib.import_module("pyseccomp")

EPERM, ENOSYS = 1, 38

FORBIDDEN = {
    "kernel keys": ["add_key", "keyctl", "request_key"],
    "programs and counters in the kernel": ["bpf", "perf_event_open", "userfaultfd"],
    "other processes": [
        *("ptrace", "process_vm_readv", "process_vm_writev", "process_madvise"),
        *("kcmp", "pidfd_getfd"),
    ],
    "mounts": [
        *("mount", "umount2", "pivot_root", "chroot", "mount_setattr", "move_mount", "open_tree"),
        *("fsopen", "fsconfig", "fsmount", "fspick", "swapon", "swapoff"),
        *("quotactl", "quotactl_fd"),
    ],
    "namespaces and handles": [
        *("setns", "unshare", "open_by_handle_at", "name_to_handle_at", "fanotify_init"),
    ],
    "the machine": [
        *("init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load"),
        *("reboot", "acct", "syslog", "lookup_dcookie", "iopl", "ioperm", "modify_ldt"),
        *("vhangup", "uselib", "ustat", "sysfs", "_sysctl", "settimeofday", "clock_settime"),
        *("clock_adjtime", "adjtimex", "sethostname", "setdomainname"),
    ],
    "placement of memory": [
        *("mbind", "migrate_pages", "move_pages", "set_mempolicy", "set_mempolicy_home_node"),
        "memfd_secret",
    ],
}
"""Refused with EPERM, whatever their arguments."""

ABSENT = ["io_uring_setup", "io_uring_enter", "io_uring_register", "clone3"]
"""Refused with ENOSYS, so that libraries fall back: clone3 hides its flags from a filter."""

OUTLIVING = ["shmget", "msgget", "semget", "mq_open"]
"""Absent too: what they make stays after the call that made it, and takes the sandbox's memory."""

OWN_SCHEDULING = ["sched_setattr", "sched_setparam", "sched_setscheduler", "sched_setaffinity"]
"""Their first argument is a process, 0 for the caller; the sandbox's helper is one, too."""

OWN_PRIORITY = {"setpriority": 1, "ioprio_set": 2}
"""Call → the last kind of target that is a process or a group; the next is all processes of a user.
The target itself, 0 for the caller's own, follows."""

NEW_NAMESPACES = 0x7E02_0080
"""CLONE_NEW{TIME,NS,CGROUP,UTS,IPC,USER,PID,NET}."""
HIGHEST_FAMILY = 10
"""AF_INET6. Above lie netlink, packet, alg, vsock and the rest."""
FORBIDDEN_IOCTLS = {"TIOCSTI": 0x5412, "TIOCLINUX": 0x541C}
ASK_PERSONALITY = 0xFFFF_FFFF
"""The one argument of personality(2) that changes nothing."""


def build() -> Any:
    """The filter, as pyseccomp's `SyscallFilter`."""
    rules = seccomp.SyscallFilter(seccomp.ALLOW)
    for name in (name for group in FORBIDDEN.values() for name in group):
        _add(rules, EPERM, name)
    for name in ABSENT + OUTLIVING:
        _add(rules, ENOSYS, name)
    _keep_to_themselves(rules)
    for bit in (1 << n for n in range(32) if NEW_NAMESPACES >> n & 1):
        _add(rules, EPERM, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, bit, bit))
    for name in ("socket", "socketpair"):
        _add(rules, EPERM, name, seccomp.Arg(0, seccomp.GT, HIGHEST_FAMILY))
        for family in range(3, HIGHEST_FAMILY):
            _add(rules, EPERM, name, seccomp.Arg(0, seccomp.EQ, family))
    for number in FORBIDDEN_IOCTLS.values():
        low = seccomp.Arg(1, seccomp.MASKED_EQ, 0xFFFF_FFFF, number)
        _add(rules, EPERM, "ioctl", low)
    _add(rules, EPERM, "personality", seccomp.Arg(0, seccomp.NE, ASK_PERSONALITY))
    return rules


def _keep_to_themselves(rules: Any) -> None:
    """Nobody changes the limits or the scheduling of another process.

    Arguments are compared in full width: what the kernel would cut off does not hide a target.
    """
    another, changing = seccomp.Arg(0, seccomp.NE, 0), seccomp.Arg(2, seccomp.NE, 0)
    _add(rules, EPERM, "prlimit64", another, changing)
    for name in OWN_SCHEDULING:
        _add(rules, EPERM, name, another)
    for name, last in OWN_PRIORITY.items():
        _add(rules, EPERM, name, seccomp.Arg(0, seccomp.GT, last))
        _add(rules, EPERM, name, seccomp.Arg(1, seccomp.NE, 0))


def _add(rules: Any, error: int, name: str, *arguments: Any) -> None:
    rules.add_rule(seccomp.ERRNO(error), name, *arguments)


if __name__ == "__main__":
    with (Path(__file__).parent / "seccomp_x86_64.bpf").open("wb") as file:
        build().export_bpf(file)
