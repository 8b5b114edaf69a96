"""Celery: the doorbell between processes, and the thin tasks behind it.

The row is the job; a message only says that somebody should look now. `advance` carries ids, runs
one stage under the cycle's lease and is acknowledged afterwards, so a message that is lost, doubled
or delivered again after the visibility time-out changes nothing: the second holder finds a live
lease and leaves. A broker that is away or was flushed costs seconds (`flywheel/watch.py`).

Scaling out: workers on any number of machines; those with an accelerator take the queue `gpu`
(training), the others `default`. Valkey, Redis and RabbitMQ serve as brokers.
"""

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from celery import Celery
from kombu.exceptions import OperationalError

from flywheel.cycle_store import CycleStore
from flywheel.records import CycleId, StageName, StageState
from flywheel.store import transaction
from flywheel.watch import Due, Duties, Watch
from runtime.run import TenantId

DEFAULT_QUEUE = "default"
GPU_QUEUE = "gpu"
QUEUES = (DEFAULT_QUEUE, GPU_QUEUE)
ADVANCE = "noria.advance"
OPEN_DUE = "noria.open_due"

VISIBILITY_SECONDS = 3600
"""After so long a message that nobody acknowledged is delivered again."""
BEAT_SECONDS = 60.0
"""How often beat asks for cycles that are due by the clock."""
RING_EXPIRES_SECONDS = 60
"""An older ring says nothing that the rows do not say."""
PUBLISH_RETRIES = 1


def queue_of(stage: StageName) -> str:
    """The queue whose workers run such a stage."""
    return GPU_QUEUE if stage in (StageName.SFT, StageName.GRPO) else DEFAULT_QUEUE


def serves(queues: frozenset[str], stage: StageName) -> bool:
    """Whether a worker of these queues runs such a stage."""
    return queue_of(stage) in queues


def celery_app(broker_url: str) -> Celery:
    """An app that knows its broker, its queues and the beat's schedule, and no task yet."""
    app = Celery("noria", broker=broker_url, set_as_current=False)
    app.conf.update(
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        task_ignore_result=True,
        result_backend=None,
        result_expires=None,
        task_serializer="json",
        accept_content=["json"],
        task_default_queue=DEFAULT_QUEUE,
        task_create_missing_queues=True,
        worker_prefetch_multiplier=1,
        worker_enable_remote_control=False,
        worker_send_task_events=False,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_connection_timeout=2,
        broker_transport_options=_transport_options(broker_url),
        enable_utc=True,
        timezone="UTC",
        beat_schedule={
            "cycles that are due": {
                "task": OPEN_DUE,
                "schedule": BEAT_SECONDS,
                "options": {"expires": RING_EXPIRES_SECONDS, "retry": False},
            }
        },
    )
    return app


def _transport_options(broker_url: str) -> dict[str, Any]:
    """What a lost worker's message waits for on Redis and Valkey; publishing gives up at once."""
    options: dict[str, Any] = {
        "max_retries": PUBLISH_RETRIES,
        "interval_start": 0,
        "interval_step": 0.1,
        "interval_max": 0.1,
    }
    if urlsplit(broker_url).scheme.startswith(("redis", "valkey")):
        options |= {
            "visibility_timeout": VISIBILITY_SECONDS,
            "unacked_restore_interval": 2,
            "unacked_restore_throttle": 1,
            "socket_connect_timeout": 2,
        }
    return options


def add_tasks(app: Celery, watch: Watch, duties: Duties) -> None:
    """The tasks of a worker; beat and those who ring know them by name only."""

    def advance(tenant_id: str, cycle_id: str) -> None:
        watch.take(TenantId(tenant_id), CycleId(cycle_id))

    def open_due() -> None:
        duties.open_due()

    app.task(name=ADVANCE)(advance)
    app.task(name=OPEN_DUE)(open_due)


def ring(app: Celery, due: Due) -> bool:
    """Ask whichever worker is free to advance the cycle; False where the broker is away."""
    try:
        app.send_task(
            ADVANCE,
            (due.tenant_id, due.cycle_id),
            queue=due.queue,
            expires=RING_EXPIRES_SECONDS,
            retry=False,
        )
    except OperationalError:
        return False
    return True


UNFINISHED = frozenset({StageState.PENDING, StageState.RUNNING, StageState.WAITING})


def due_now(url: str) -> list[Due]:
    """The cycles that can go on, with the queue of their next stage. Raises StoreError."""
    with transaction(url) as connection:
        store = CycleStore(connection)
        return [_due(store, tenant_id, cycle_id) for tenant_id, cycle_id in store.due()]


def _due(store: CycleStore, tenant_id: TenantId, cycle_id: CycleId) -> Due:
    left = [s for s in store.stages(tenant_id, cycle_id) if s.state in UNFINISHED]
    if not left:  # only its end is missing
        return Due(tenant_id, cycle_id, -1, "", DEFAULT_QUEUE)
    return Due(tenant_id, cycle_id, left[0].seq, left[0].state, queue_of(left[0].name))


def chosen_queues(names: Sequence[str]) -> frozenset[str]:
    """Raises ValueError naming the queues that exist."""
    if unknown := set(names) - set(QUEUES):
        raise ValueError(f"no queue {', '.join(sorted(unknown))}; queues: {', '.join(QUEUES)}")
    return frozenset(names)
