"""The pool as people page through it: no expectation, no tokens, a cursor for what follows."""

import base64
import binascii
import re
from datetime import datetime

from flywheel.lessons.pool import Cursor, PoolStore, Split
from flywheel.records import PoolStatus, PoolTask, PoolTaskId
from flywheel.schemas import PoolPage, PoolTaskView
from runtime.errors import InputError
from runtime.run import TenantId

_TASK_ID = re.compile(r"task_[0-9a-f]{24}")


def pool_page(
    store: PoolStore,
    tenant_id: TenantId,
    *,
    domain: str | None,
    status: PoolStatus | None,
    split: Split | None,
    cursor: str | None,
    limit: int,
) -> PoolPage:
    """Newest first. Raises InputError for a cursor that no page gave."""
    before = None if cursor is None else decode_cursor(cursor)
    tasks = store.page(
        tenant_id, domain=domain, status=status, split=split, before=before, limit=limit + 1
    )
    more = len(tasks) > limit
    return PoolPage(
        tasks=[_view(task) for task in tasks[:limit]],
        counts=store.counts(tenant_id, domain),
        next_cursor=encode_cursor(tasks[limit - 1]) if more else None,
    )


def _view(task: PoolTask) -> PoolTaskView:
    common = set(PoolTaskView.model_fields) & set(PoolTask.model_fields)
    return PoolTaskView(
        **task.model_dump(include=common), level=task.task.level, input=task.task.input
    )


def encode_cursor(last: PoolTask) -> str:
    return base64.urlsafe_b64encode(f"{last.created_at.isoformat()} {last.id}".encode()).decode()


def decode_cursor(cursor: str) -> Cursor:
    """Raises InputError for what `encode_cursor` did not write."""
    try:
        text = base64.b64decode(cursor, altchars=b"-_", validate=True).decode("ascii")
        at, _, task_id = text.partition(" ")
        created_at = datetime.fromisoformat(at)
        if created_at.tzinfo is None or _TASK_ID.fullmatch(task_id) is None:
            raise ValueError("incomplete")
    except (binascii.Error, ValueError) as error:
        message = "not a cursor of this API; pass next_cursor of the page before"
        errors = [{"field": "cursor", "message": message}]
        raise InputError(f"cursor: {message}", errors=errors) from error
    return created_at, PoolTaskId(task_id)
