"""A process that owns a sandbox, to be killed by a test: `sandbox_owner.py STATE BWRAP UID`.

Opens a sandbox, starts a command in it that never ends, prints one JSON line (the sandbox's outer
process, and what a look around from inside shows), and waits.
"""

import asyncio
import json
import sys
from pathlib import Path

from runtime.sandbox.bubblewrap import BubblewrapBackend
from runtime.sandbox.protocol import SandboxSpec

LOOK = """
cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n'; env
cat /proc/self/uid_map; grep -r canary /tmp /workspace /etc /dev/shm 2>/dev/null
"""


async def main(state: str, bwrap: str, uid: str) -> None:
    backend = BubblewrapBackend(state_dir=Path(state), bwrap=Path(bwrap), uid=int(uid))
    sandbox = await backend.open(SandboxSpec(), files={"x": b"1"})
    look = await sandbox.exec(LOOK)
    snapshot = await sandbox.snapshot()
    endless = asyncio.ensure_future(sandbox.exec("setsid sleep 3000 & sleep 3000"))
    seen = {"look": look.stdout.decode(), "snapshot": snapshot, "strengths": backend.strengths()}
    sys.stdout.write(json.dumps(seen) + "\n")
    sys.stdout.flush()
    await endless


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
