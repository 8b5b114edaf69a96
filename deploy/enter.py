"""Becomes a child of the supervisor: private mounts, unprivileged uid, death signal, exec.

Run as `python -I -S enter.py PLAN` (a JSON object, see `Plan`); the standard library is all it
uses, because it runs before anything is known to be reachable. The order matters. Mounts come
first, while the process may still read a data directory below a 0700 folder such as /root: bind
mounts in a mount namespace of its own bring data and programs to a short public place, and vanish
with the process. The uid drop follows; the parent-death signal comes after it, because the kernel
forgets that signal at a change of credentials; a parent that died in between is noticed last.

Scaling past one machine: only the embedded stack starts its services so; elsewhere an init system
or Kubernetes owns the processes.
"""

import ctypes
import json
import os
import sys
from typing import NoReturn, TypedDict

CLONE_NEWNS = 0x0002_0000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x4_0000
PR_SET_PDEATHSIG = 1


class Plan(TypedDict):
    argv: list[str]
    parent: int
    """Pid of the supervisor."""
    death_signal: int
    """What the kernel sends this process when its parent dies."""
    uid: int | None
    """None keeps the uid (and makes `mounts` meaningless)."""
    mounts: list[tuple[str, str]]
    """Source and target of each bind mount. Targets exist."""


def main() -> NoReturn:
    plan: Plan = json.loads(sys.argv[1])
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        if plan["uid"] is not None:
            _mount_privately(libc, plan["mounts"])
            _drop(plan["uid"])
        _check(libc.prctl(PR_SET_PDEATHSIG, plan["death_signal"], 0, 0, 0), "prctl")
        if os.getppid() != plan["parent"]:
            sys.exit("the supervisor died before this service started")
        os.execv(plan["argv"][0], plan["argv"])
    except OSError as error:
        sys.exit(f"cannot start {plan['argv'][0]}: {error}")


def _mount_privately(libc: ctypes.CDLL, mounts: list[tuple[str, str]]) -> None:
    try:
        _check(libc.unshare(CLONE_NEWNS), "unshare")
        _check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "mount / private")
    except PermissionError as error:
        sys.exit(
            f"root may not make a mount namespace here ({error}), so the embedded services cannot "
            "drop root; start Noria as an ordinary user, or give CAP_SYS_ADMIN, or set "
            "NORIA_DATABASE_URL and NORIA_BROKER_URL to services of your own"
        )
    for source, target in mounts:
        status = libc.mount(os.fsencode(source), os.fsencode(target), None, MS_BIND, None)
        _check(status, f"bind {source}")


def _drop(uid: int) -> None:
    os.chdir("/")
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _check(status: int, what: str) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
