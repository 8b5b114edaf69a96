"""The embedded Postgres and Valkey, really started: where, as whom, and what is left of them."""

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from deploy.attach import running, stop_up
from deploy.embedded import (
    Postgres,
    bwrap_program,
    postgres_program,
    postgres_url,
    valkey_program,
    valkey_socket,
)
from deploy.home import CannotRun, Home
from deploy.up_record import UpRecord, read_up
from runtime.settings import CLONE, Settings, child_environment
from tests.integration.process_watch import descendants, survivors

ONLY = ["postgres", "valkey"]
NO_ACCOUNT = 61_234
"""A uid that no machine gives anybody."""
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="noria-t-") as folder:
        Path(folder).chmod(0o755)
        monkeypatch.setenv("NORIA_RUNTIME_DIR", folder)
        yield Path(folder)


@pytest.fixture
def settings(tmp_path: Path, sockets: Path) -> Settings:
    """A data directory deep below a folder that only its owner may enter."""
    closed = tmp_path / "closed to others"
    closed.mkdir(mode=0o700)
    deep = closed / "a deep path" / "ü with spaces" / ("long " * 20).strip()
    return Settings(home=deep, database_url=None, broker_url=None)


def query(home: Home, text: str) -> list[tuple[object, ...]]:
    with psycopg.connect(postgres_url(home), autocommit=True) as connection:
        cursor = connection.execute(text.encode())
        return cursor.fetchall() if cursor.description else []


def owner(record: UpRecord, name: str) -> int:
    return Path(f"/proc/{record.process(name).pid}").stat().st_uid


def test_data_survives_restarts_and_a_killed_supervisor(settings: Settings) -> None:
    home = Home.of(settings)
    with running(settings, ONLY) as first:
        query(home, "CREATE TABLE kept (n int)")
        query(home, "INSERT INTO kept VALUES (1)")
        below = descendants(first.pid)
        assert len(below) > 2, "the servers have processes of their own"
    assert survivors(below, 0) == []
    assert not home.sockets.exists()

    with running(settings, ONLY) as second:
        query(home, "INSERT INTO kept VALUES (2)")
        below = descendants(second.pid)
        os.kill(second.pid, signal.SIGKILL)
        assert survivors(below) == []
    assert read_up(settings) is None

    with running(settings, ONLY):
        assert query(home, "SELECT n FROM kept ORDER BY n") == [(1,), (2,)]
    assert not home.sockets.exists()
    mounted = Path("/proc/self/mounts").read_text()
    assert home.sockets.name not in mounted


def test_nothing_listens_and_nothing_is_open_to_others(settings: Settings) -> None:
    home = Home.of(settings)
    with running(settings, ONLY) as record:
        assert query(home, "SHOW listen_addresses") == [("",)]
        for socket in (home.sockets / "pg" / ".s.PGSQL.5432", valkey_socket(home)):
            assert stat.S_IMODE(socket.stat().st_mode) == 0o700
            assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
        unprivileged = settings.service_uid if os.getuid() == 0 else os.getuid()
        assert owner(record, "postgres") == owner(record, "valkey") == unprivileged
        without = f"postgresql://noria:wrong@/noria?host={home.sockets / 'pg'}"
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            psycopg.connect(without)
    secrets = home.root / "secrets"
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in secrets.iterdir()} == {0o600}


def test_the_broker_keeps_what_it_was_told(settings: Settings) -> None:
    async def say(words: str) -> bytes:
        reader, writer = await asyncio.open_unix_connection(valkey_socket(Home.of(settings)))
        writer.write(f"{words}\r\n".encode())
        answer = await reader.readline()
        if answer.startswith(b"$"):
            answer = await reader.readline()
        writer.close()
        await writer.wait_closed()
        return answer.strip()

    with running(settings, ["valkey"]):
        assert asyncio.run(say("SET job 7")) == b"+OK"
    with running(settings, ["valkey"]):
        assert asyncio.run(say("GET job")) == b"7"


def test_attaching_uses_what_runs_and_down_ends_it(settings: Settings) -> None:
    with running(settings, ["valkey"]) as outer:
        with running(settings, ["valkey"]) as inner:
            assert inner.pid == outer.pid
        assert read_up(settings) is not None, "who only attached does not end it"
        assert stop_up(settings)
        assert read_up(settings) is None
        assert not stop_up(settings)


def test_a_dead_postgres_ends_the_supervisor_with_its_log(settings: Settings) -> None:
    with running(settings, ONLY) as record:
        below = descendants(record.pid)
        pid = record.process("postgres").pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert survivors([record.pid, *below]) == []
    assert "postgres was ended by SIGKILL" in Home.of(settings).log("up").read_text()


@as_root
def test_an_ordinary_user_without_an_account(tmp_path: Path, sockets: Path) -> None:
    sockets.chmod(0o1777)
    home = sockets / "home of nobody"
    home.mkdir()
    os.chown(home, NO_ACCOUNT, NO_ACCOUNT)
    script = Path(__file__).with_name("ordinary_user.py")
    done = subprocess.run(
        [*_where_all_may_enter(), sys.executable, script, home, str(NO_ACCOUNT)],
        capture_output=True,
        text=True,
        env=child_environment(PYTHONPATH=str(CLONE), PYTHONDONTWRITEBYTECODE="1"),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["answer"] == 42
    assert said["owners"] == {"postgres": NO_ACCOUNT, "valkey": NO_ACCOUNT}


def _where_all_may_enter() -> list[str]:
    """A view of this machine in which everybody may enter the folders that lead to Python.

    Closed folders (such as /root, where root keeps its Pythons) are covered by open ones that hold
    nothing but what is needed.
    """
    needed = {Path(sys.base_prefix), Path(sys.prefix), CLONE}
    closed = {p for n in needed for p in n.parents if not p.stat().st_mode & stat.S_IXOTH}
    hidden = sorted(n for n in needed if closed & set(n.parents))
    between = sorted({p for n in hidden for p in n.parents if closed & set(p.parents)} - closed)
    words = ["--dev-bind", "/", "/", "--cap-add", "ALL"]
    for folder in sorted(closed):
        words += ["--perms", "0755", "--tmpfs", str(folder)]
    for folder in between:
        words += ["--perms", "0755", "--dir", str(folder)]
    for folder in hidden:
        words += ["--dev-bind", str(folder), str(folder)]
    return [str(bwrap_program(Settings())), *words, "--"]


# ---------------------------------------------------------------- what is refused


def script(path: Path, says: str) -> Path:
    """A stand-in program that says a version and does nothing else."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


def test_programs_that_are_too_old_are_refused(tmp_path: Path) -> None:
    postgres = script(tmp_path / "bin" / "postgres", "postgres (PostgreSQL) 13.4")
    with pytest.raises(CannotRun, match="version 14 or newer is needed; set NORIA_POSTGRES_BIN"):
        postgres_program(Settings(postgres_bin=postgres.parent))
    valkey = script(tmp_path / "redis-server", "Redis server v=6.2.1 sha=0:0 malloc=libc")
    with pytest.raises(CannotRun, match="version 7 or newer is needed; set NORIA_VALKEY_BIN"):
        valkey_program(Settings(valkey_bin=valkey))
    with pytest.raises(CannotRun, match="cannot be run"):
        postgres_program(Settings(postgres_bin=tmp_path / "nowhere"))
    with pytest.raises(CannotRun, match="set NORIA_BWRAP"):
        bwrap_program(Settings(bwrap=tmp_path / "nowhere"))


def test_new_enough_system_programs_are_used(tmp_path: Path) -> None:
    valkey = script(tmp_path / "valkey-server", "Valkey server v=8.0.1 sha=0:0")
    assert valkey_program(Settings(valkey_bin=valkey)).major == 8
    postgres = script(tmp_path / "bin" / "postgres", "postgres (PostgreSQL) 16.2 (Debian 16.2-1)")
    program = postgres_program(Settings(postgres_bin=postgres.parent))
    assert (program.major, program.at(program.tree)) == (16, str(postgres))


def test_data_of_another_major_version_is_refused(tmp_path: Path, sockets: Path) -> None:
    settings = Settings(home=tmp_path)
    home = Home.of(settings)
    home.create()
    (tmp_path / "postgres").mkdir()
    (tmp_path / "postgres" / "PG_VERSION").write_text("15\n")
    with pytest.raises(CannotRun, match="written by Postgres 15 and 18 is installed"):
        asyncio.run(Postgres(home, settings, {}).prepare())


def test_a_folder_for_sockets_must_be_short(tmp_path: Path) -> None:
    long = Settings(home=tmp_path, runtime_dir=tmp_path / ("long" * 20))
    with pytest.raises(CannotRun, match="set NORIA_RUNTIME_DIR to a shorter one"):
        Home.of(long).open_sockets()
