"""Between the runner and bwrap: builds a private mount namespace, drops rights, becomes bwrap.

Run as a script by `bubblewrap.py` (standard library only, few imports), never imported by it. bwrap
alone cannot do what is needed here:

- cap the number of files of a tmpfs (it has `--size` only): the workspace, /tmp and /dev/shm are
  mounted here, with `nr_inodes`, and handed to bwrap as binds;
- reach a Python, a bwrap or a helper that lies under a folder closed to the sandbox's uid (a clone
  under /root): the one is opened while we still may and bound into a staging folder, the small
  others are copied there, so that not even their own modes matter;
- join a cgroup, and die with a parent that runs under another uid;
- hand the helper a writable /proc, as a descriptor: the one inside is read-only.

As root the mount namespace alone is new, and root is given up for the sandbox's uid afterwards; as
an ordinary user a user namespace of one's own makes the same mounts possible. Everything mounted
here vanishes with the last process of the sandbox: nothing is left to sweep. The staging folder is
a tmpfs over an existing folder, seen by nobody else.

    launch.py OWNER UID STAGE { --cgroup PROCS | --bind SOURCE NAME | --copy SOURCE NAME
                              | --file NAME TEXT | --tmpfs NAME BYTES INODES } …
                              -- PROGRAM ARGUMENT…

The program gets one more argument: the number of the descriptor that /proc is open on.
"""

import ctypes
import os
import resource
import sys

CLONE_NEWNS = 0x0002_0000
CLONE_NEWUSER = 0x1000_0000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 1 << 12, 1 << 14, 1 << 18
PR_SET_PDEATHSIG = 1
SIGKILL = 9
FAILED = 70
STAGE_OPTIONS = "size=8m,nr_inodes=1k,mode=0755"
libc = ctypes.CDLL(None, use_errno=True)


class Plan:
    """The parsed arguments."""

    def __init__(self, arguments: list[str]) -> None:
        self.owner = int(arguments[0])
        self.uid = int(arguments[1])
        self.gid = self.uid if os.geteuid() == 0 else os.getgid()
        self.stage = arguments[2]
        self.cgroups: list[str] = []
        self.binds: list[tuple[str, str]] = []
        self.copies: list[tuple[str, str]] = []
        self.files: list[tuple[str, str]] = []
        self.tmpfs: list[tuple[str, int, int]] = []
        self.program = self._parse(arguments[3:])

    def _parse(self, left: list[str]) -> list[str]:
        while left[0] != "--":
            match left:
                case ["--cgroup", procs, *left]:
                    self.cgroups.append(procs)
                case ["--bind", source, name, *left]:
                    self.binds.append((source, name))
                case ["--copy", source, name, *left]:
                    self.copies.append((source, name))
                case ["--file", name, text, *left]:
                    self.files.append((name, text))
                case ["--tmpfs", name, size, inodes, *left]:
                    self.tmpfs.append((name, int(size), int(inodes)))
                case _:
                    raise ValueError(f"unknown argument {left[0]!r}")
        return left[1:]


def checked(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    encoded = [os.fsencode(text) for text in (source, target, kind, options)]
    checked(libc.mount(*encoded[:3], ctypes.c_ulong(flags), encoded[3]), f"mounting {target}")


def enter_namespaces(root: bool) -> None:
    uid, gid = os.getuid(), os.getgid()
    flags = CLONE_NEWNS if root else CLONE_NEWNS | CLONE_NEWUSER
    checked(libc.unshare(flags), "making a mount namespace")
    if not root:
        write("/proc/self/setgroups", "deny")
        write("/proc/self/uid_map", f"{uid} {uid} 1")
        write("/proc/self/gid_map", f"{gid} {gid} 1")
    mount("none", "/", "", MS_REC | MS_PRIVATE)


def write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def build_stage(plan: Plan) -> None:
    """Sources are opened and read before the stage covers whatever lies beneath it."""
    opened = [(os.open(source, os.O_PATH), name) for source, name in plan.binds]
    copies = [copy for source, name in plan.copies for copy in read_all(source, name)]
    mount("tmpfs", plan.stage, "tmpfs", MS_NOSUID | MS_NODEV, STAGE_OPTIONS)
    for descriptor, name in opened:
        target = f"{plan.stage}/{name}"
        os.makedirs(target)
        mount(f"/proc/self/fd/{descriptor}", target, "", MS_BIND | MS_REC)
        os.close(descriptor)
    for name, content, modified in copies:
        write_copy(f"{plan.stage}/{name}", content, modified)
    for name, text in plan.files:
        write(f"{plan.stage}/{name}", text)
    for name, size, inodes in plan.tmpfs:
        target = f"{plan.stage}/{name}"
        os.mkdir(target)
        options = f"size={size},nr_inodes={inodes + 1},mode=0755,uid={plan.uid},gid={plan.gid}"
        mount("tmpfs", target, "tmpfs", MS_NOSUID | MS_NODEV, options)


def read_all(source: str, name: str) -> list[tuple[str, bytes, int]]:
    """(name, content, modification time in ns) of a file, or of all files beneath a folder."""
    if os.path.isdir(source):
        below = sorted(os.listdir(source))
        return [copy for each in below for copy in read_all(f"{source}/{each}", f"{name}/{each}")]
    with open(source, "rb") as file:
        return [(name, file.read(), os.fstat(file.fileno()).st_mtime_ns)]


def write_copy(path: str, content: bytes, modified: int) -> None:
    """Readable and executable by all. The time is kept: compiled Python is valid by it."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(content)
    os.chmod(path, 0o755)
    os.utime(path, ns=(modified, modified))


def hold_proc() -> int:
    """A descriptor of this host's /proc, for the program we become."""
    opened = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
    os.set_inheritable(opened, True)
    return opened


def give_up_root(uid: int) -> None:
    """From here on nothing of the host belongs to us, whatever the sandbox's own uids say."""
    _, most = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def die_with(owner: int) -> None:
    """Must follow the change of uid, which clears the setting."""
    checked(libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0), "asking for the parent's death signal")
    if os.getppid() != owner:
        sys.exit(f"the runner {owner} died while its sandbox started")


def launch(arguments: list[str]) -> None:
    plan = Plan(arguments)
    root = os.geteuid() == 0
    for procs in plan.cgroups:
        write(procs, str(os.getpid()))
    os.umask(0o022)
    enter_namespaces(root)
    build_stage(plan)
    if root:
        give_up_root(plan.uid)
    proc = hold_proc()
    die_with(plan.owner)
    os.chdir("/")
    os.execve(plan.program[0], [*plan.program, str(proc)], {})


if __name__ == "__main__":
    try:
        launch(sys.argv[1:])
    except (OSError, ValueError) as error:
        sys.stderr.write(f"launch: {error}\n")
        sys.exit(FAILED)
