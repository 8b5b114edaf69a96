"""What turning the wheel needs of its process: one object, built in `deploy/composition.py`.

It holds addresses and factories, never a connection: every stage opens its own transaction, and
whatever must survive the process is a row or a file below `home`.

Scaling out: any number of workers on any number of machines build the same wheel from the same
settings; `home` is then shared storage, or an object store mounted there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flywheel.bridge import Bridge
from runtime.database import Database
from runtime.domain import Domain
from runtime.engine.protocol import Engine
from runtime.run import Policy
from runtime.run_executor import Workplace


@dataclass(frozen=True, slots=True)
class Wheel:
    url: str
    """Of Postgres."""
    home: Path
    """Data directory: `adapters/` and `cycles/` live in it."""
    bridge: Bridge
    database: Database
    """The asynchronous pool, opened on the bridge; for admitting runs."""
    engine: Engine
    domains: Mapping[str, Domain]
    recipes: Mapping[str, Path]
    """Domain → its recipe's file; a domain without one does not turn."""
    workplace: Workplace
    """Where demonstrations are played."""
    base: Policy
    model_dir: Path

    @property
    def adapters(self) -> Path:
        """Folder of the registered adapters, one immutable folder each."""
        return self.home / "adapters"

    def job_folder(self, cycle_id: str, stage_seq: int) -> Path:
        """Working folder of one training stage."""
        return self.home / "cycles" / cycle_id / f"stage-{stage_seq:02d}"
