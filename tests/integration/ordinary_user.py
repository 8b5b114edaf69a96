"""One life of the embedded services, for `test_embedded` to run as whoever it likes.

Run as `python ordinary_user.py HOME [UID]`; with UID it first becomes that user, who has no account
and no rights. Starts Postgres and Valkey, writes and reads, stops, and prints what it saw as JSON.
"""

import json
import os
import sys
from pathlib import Path

import psycopg

from deploy.attach import running
from deploy.embedded import postgres_url
from deploy.home import Home
from runtime.settings import Settings


def main() -> None:
    if len(sys.argv) > 2:
        uid = int(sys.argv[2])
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    settings = Settings(home=Path(sys.argv[1]))
    with (
        running(settings, only=["postgres", "valkey"]) as record,
        psycopg.connect(postgres_url(Home.of(settings))) as connection,
    ):
        connection.execute("CREATE TABLE seen AS SELECT 42 AS answer")
        row = connection.execute("SELECT answer FROM seen").fetchone()
        owners = {p.name: Path(f"/proc/{p.pid}").stat().st_uid for p in record.processes}
    print(json.dumps({"answer": row and row[0], "uid": os.getuid(), "owners": owners}))


if __name__ == "__main__":
    main()
