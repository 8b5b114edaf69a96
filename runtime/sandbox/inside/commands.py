"""One command inside the sandbox: started in a session of its own, bounded, and gone afterwards.

The helper is process 1 of the sandbox's process namespace, so `kill(-1)` is every process but the
helper, at once and without a race against forks: whatever a command left running (daemons that
left its session, background children) ends with the call. Output beyond the cap is read, counted
as truncated and dropped, so a flood can block nobody. Where no cgroup limits memory the helper
sums the resident memory of all processes every tick and kills them when they exceed their limit.
"""

import ctypes
import os
import resource
import select
import time

from .bounds import PAGE

SIGINT, SIGKILL = 2, 9
RESTORED_SIGNALS = (13, 25)
"""SIGPIPE and SIGXFSZ: ignored by Python, default for commands."""
PR_SET_DUMPABLE = 4
TICK = 0.05
"""Seconds between two looks at the deadline, at orphans and at memory."""
READ = 1 << 16
libc = ctypes.CDLL(None, use_errno=True)


class Rules:
    """Limits of every command in this sandbox, fixed when it was opened."""

    def __init__(
        self,
        processes: int,
        open_files: int,
        file_bytes: int,
        output_bytes: int,
        memory_bytes: int,
        cpus: int,
        proc: int,
    ) -> None:
        self.processes = processes
        self.open_files = open_files
        self.file_bytes = file_bytes
        self.output_bytes = output_bytes
        self.memory_bytes = memory_bytes
        """0 where a cgroup limits memory."""
        self.cpus = cpus
        self.proc = proc
        """A descriptor of a writable /proc; it may be another namespace's."""


class Command:
    """A request to run something. `environment` is complete: nothing is inherited."""

    def __init__(
        self,
        argv: list[bytes],
        environment: dict[bytes, bytes],
        folder: bytes,
        stdin: bytes,
        timeout: float,
    ) -> None:
        self.argv = argv
        self.environment = environment
        self.folder = folder
        self.stdin = stdin
        self.timeout = timeout
        """Wall seconds."""


class Capture:
    """One output stream: the first `cap` bytes are kept, the rest is read and dropped."""

    def __init__(self, descriptor: int, cap: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.kept = bytearray()
        self.truncated = False
        self._cap = cap

    def read(self) -> bool:
        """Read what is there, once. False at the end of the stream."""
        try:
            data = os.read(self.descriptor, READ)
        except BlockingIOError:
            return True
        room = self._cap - len(self.kept)
        self.kept += data[:room]
        self.truncated = self.truncated or len(data) > room
        return bool(data)

    def drain(self) -> None:
        """Read to the end; the writers are dead, so the end is near."""
        while self.read():
            pass
        os.close(self.descriptor)


class Outcome:
    """What a command did, filled while it runs."""

    def __init__(self) -> None:
        self.status: int | None = None
        """Wait status of the command itself."""
        self.timed_out = False
        self.out_of_memory = False
        self.truncated = False
        self.wall = 0.0
        self.cpu = 0.0
        """User and system seconds of every process of the call."""
        self.peak = 0
        """Largest resident set of any one process, in bytes."""
        self.stdout = b""
        self.stderr = b""


class Running:
    """A started command and the loop that watches it."""

    def __init__(self, command: Command, rules: Rules, host: int) -> None:
        self._command = command
        self._rules = rules
        self._host = host
        self._outcome = Outcome()
        self._began = time.monotonic()
        self._looked = self._began
        self._poller = select.poll()
        self._start()

    def _start(self) -> None:
        stdin, self._feed = os.pipe()
        out, stdout = os.pipe()
        err, stderr = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            become(self._command, self._rules, (stdin, stdout, stderr))
        for descriptor in (stdin, stdout, stderr):
            os.close(descriptor)
        cap = self._rules.output_bytes
        self._out, self._err = Capture(out, cap), Capture(err, cap)
        self._exit = os.pidfd_open(self._pid)
        self._unsent = memoryview(self._command.stdin)
        os.set_blocking(self._feed, False)
        self._feeding = True
        for descriptor in (out, err, self._exit, self._host):
            self._poller.register(descriptor, select.POLLIN)
        self._poller.register(self._feed, select.POLLOUT)

    def finish(self) -> Outcome:
        """Watch until the command ends or must end, kill what is left, and say what happened."""
        while self._outcome.status is None and not self._must_end():
            for descriptor, _ in self._poller.poll(int(TICK * 1000)):
                self._serve(descriptor)
            self._reap(os.WNOHANG)
        self._outcome.wall = time.monotonic() - self._began
        kill_everything()
        self._reap(0)
        return self._collect()

    def _serve(self, descriptor: int) -> None:
        if descriptor == self._host:
            leave()
        elif descriptor == self._feed:
            self._write_stdin()
        elif descriptor != self._exit:
            capture = self._out if descriptor == self._out.descriptor else self._err
            if not capture.read():
                self._poller.unregister(descriptor)

    def _write_stdin(self) -> None:
        try:
            self._unsent = self._unsent[os.write(self._feed, self._unsent) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._unsent = self._unsent[:0]
        if not self._unsent:
            self._stop_feeding()

    def _stop_feeding(self) -> None:
        if self._feeding:
            self._feeding = False
            self._poller.unregister(self._feed)
            os.close(self._feed)

    def _must_end(self) -> bool:
        now = time.monotonic()
        if now - self._began >= self._command.timeout:
            self._outcome.timed_out = True
            return True
        limit = self._rules.memory_bytes
        if limit and now - self._looked >= TICK:
            self._looked = now
            self._outcome.out_of_memory = resident_bytes() > limit
        return self._outcome.out_of_memory

    def _reap(self, options: int) -> None:
        """Collect the dead; with options 0, wait until nobody is left."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, options)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._outcome.cpu += usage.ru_utime + usage.ru_stime
            self._outcome.peak = max(self._outcome.peak, usage.ru_maxrss * 1024)
            if pid == self._pid:
                self._outcome.status = status

    def _collect(self) -> Outcome:
        self._stop_feeding()
        os.close(self._exit)
        outcome = self._outcome
        for capture in (self._out, self._err):
            capture.drain()
            outcome.truncated = outcome.truncated or capture.truncated
        outcome.stdout, outcome.stderr = bytes(self._out.kept), bytes(self._err.kept)
        return outcome


# ---------------------------------------------------------------- the child


def become(command: Command, rules: Rules, streams: tuple[int, int, int]) -> None:
    """Turn the forked child into the command. Never returns."""
    try:
        os.setsid()
        for target, source in enumerate(streams):
            os.dup2(source, target, inheritable=True)
        restore_signals()
        offer_to_oom_killer(rules.proc)
        apply_limits(command, rules)
        os.chdir(command.folder)
        os.execvpe(command.argv[0], command.argv, command.environment)
    except OSError as error:
        name = command.argv[0].decode("utf-8", "replace")
        os.write(2, f"{name}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)
    except BaseException as error:
        os.write(2, f"could not start the command: {error!r}\n".encode())
    os._exit(126)


def restore_signals() -> None:
    for number in RESTORED_SIGNALS:
        libc.signal(number, None)


def offer_to_oom_killer(proc: int) -> None:
    """Where memory runs out the command is to die, never the helper. Inherited by its children.

    They cannot take it back: the /proc that they see is read-only. `proc` is another one.
    """
    libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    score = os.open("self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
    os.write(score, b"1000")
    os.close(score)


def apply_limits(command: Command, rules: Rules) -> None:
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: rules.processes + 1,
        resource.RLIMIT_NOFILE: rules.open_files,
        resource.RLIMIT_FSIZE: rules.file_bytes,
        resource.RLIMIT_CPU: (int(command.timeout) + 1) * rules.cpus,
    }
    if rules.memory_bytes:
        limits[resource.RLIMIT_DATA] = rules.memory_bytes
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))


# ---------------------------------------------------------------- everything else in here


def kill_everything() -> None:
    """Every process of the sandbox but this one."""
    try:
        os.kill(-1, SIGKILL)
    except ProcessLookupError:
        return


def leave() -> None:
    """The host is gone or done: take everything along. Never returns."""
    kill_everything()
    while True:
        try:
            os.wait()
        except ChildProcessError:
            os._exit(0)


def resident_bytes() -> int:
    """Resident memory of every process but the helper; shared pages count once per process."""
    pages = 0
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == "1":
            continue
        try:
            with open(f"/proc/{name}/statm", "rb", buffering=0) as statm:
                pages += int(statm.read(128).split()[1])
        except (OSError, IndexError):
            continue
    return pages * PAGE
