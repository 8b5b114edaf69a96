"""Releases: an alias is switched to an adapter, or back, with a record of who and why.

Promotion loads and probes first; the switch itself is one transaction with the change's record,
the statuses, and the re-pinning of queued production runs, so that production resolves either to
the old policy or to the new one. Runs that have started keep their policy. Rolling back restores
what was released before and still can serve, at last the base model, which always can. Loading
takes a while, so the switch compares: where somebody else was faster, the decision is stale and
nothing is switched.

Scaling out: the alias is a row; every API process resolves it at admission.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flywheel.records import Adapter, AdapterStatus
from flywheel.release.adapters import AdapterStore, policy_of
from flywheel.release.hot_load import load
from flywheel.schemas import ReleaseView
from flywheel.store import Connection, Statements, as_json, transaction
from flywheel.wheel import Wheel
from runtime.errors import (
    AdapterRefused,
    Conflict,
    EngineRefused,
    EngineUnavailable,
    NotFound,
    ProbeFailed,
)
from runtime.run import Policy, TenantId

log = logging.getLogger(__name__)
PRODUCTION = "production"
_CHANGES_READ = 1_000


class ReleaseStore(Statements):
    """Alias changes, over one open transaction."""

    FILE = "releases.sql"

    def current(self, tenant_id: TenantId, domain: str, alias: str) -> str | None:
        """The policy id the alias resolves to; None means the base model."""
        row = self._one("get_alias", tenant_id=tenant_id, domain=domain, alias=alias)
        return None if row is None else row["policy_id"]

    def changes(
        self,
        tenant_id: TenantId,
        domain: str | None = None,
        alias: str | None = None,
        *,
        limit: int = 100,
    ) -> list[ReleaseView]:
        """Newest first."""
        rows = self._all(
            "list_changes", tenant_id=tenant_id, domain=domain, alias=alias, limit=limit
        )
        return [ReleaseView.model_validate(row) for row in rows]

    def newest(self, tenant_id: TenantId, domain: str, alias: str) -> ReleaseView | None:
        """The alias's last change."""
        return next(iter(self.changes(tenant_id, domain, alias, limit=1)), None)

    def switch(self, tenant_id: TenantId, **change: Any) -> ReleaseView | None:
        """Let the alias resolve to a policy, or with None to the base; re-pins queued runs.

        None, and nothing is changed, where it does not resolve to the `expected` policy id (None:
        the base), or resolves to the new one already. From then on nobody else switches the alias
        until the transaction ends.
        """
        made = self._one("switch_alias", tenant_id=tenant_id, **change)
        assert made is not None, "a function returns a row"
        if made["id"] is None:
            return None
        row = self._one("get_change", tenant_id=tenant_id, id=made["id"])
        return ReleaseView.model_validate(row)


def releases(
    connection: Connection, tenant_id: TenantId, domain: str | None = None
) -> list[ReleaseView]:
    """The last 100 switches, newest first."""
    return ReleaseStore(connection).changes(tenant_id, domain)


# ---------------------------------------------------------------- promote


def promote(
    wheel: Wheel,
    tenant_id: TenantId,
    adapter_name: str,
    *,
    alias: str = PRODUCTION,
    by: str,
    reason: str,
) -> ReleaseView:
    """Let the alias of the adapter's domain resolve to it, and the engine serve it.

    Repeating it changes nothing, or repairs what is not resident any more. Raises NotFound naming
    the adapters that exist, Conflict for one that the gate rejected or where the alias was switched
    to another one meanwhile, AdapterRefused or ProbeFailed where it cannot serve; then every alias
    stays as it was.
    """
    with transaction(wheel.url) as connection:
        adapter = AdapterStore(connection).get(tenant_id, adapter_name)
        serving = ReleaseStore(connection).current(tenant_id, adapter.domain, alias)
    _demand_promotable(adapter)
    load(wheel, adapter)
    switch = _Switch(tenant_id, adapter.domain, alias, serving, by, reason, AdapterStatus.RETIRED)
    with transaction(wheel.url) as connection:
        change = switch.to(adapter, connection, wheel.base)
        change = change or _released_already(connection, adapter, alias)
        if change is None:
            raise switch.stale(connection)
        return change


def _released_already(connection: Connection, adapter: Adapter, alias: str) -> ReleaseView | None:
    """The change that released it, where the alias resolves to it now."""
    store = ReleaseStore(connection)
    if store.current(adapter.tenant_id, adapter.domain, alias) != adapter.name:
        return None
    return store.newest(adapter.tenant_id, adapter.domain, alias)


def _demand_promotable(adapter: Adapter) -> None:
    if adapter.status is AdapterStatus.REJECTED:
        reasons = adapter.decision.reasons if adapter.decision else []
        raise Conflict(
            f"the gate rejected {adapter.name}: {'; '.join(reasons[:2]) or 'no reason recorded'}; "
            "a rejected adapter is never released: turn the wheel again"
        )


# ---------------------------------------------------------------- roll back


def roll_back(
    wheel: Wheel,
    tenant_id: TenantId,
    domain: str,
    *,
    alias: str = PRODUCTION,
    by: str,
    reason: str,
    leaving: str | None = None,
) -> ReleaseView:
    """Let the alias resolve to what was released before; at last to the base model.

    An earlier adapter that cannot serve any more is passed over, and the record says so. Raises
    Conflict where the alias resolves to the base model already, to another adapter than the one to
    be left (`leaving`; None: any), or was switched meanwhile; NotFound for an unknown domain.
    """
    if domain not in wheel.domains:
        known = ", ".join(wheel.domains) or "none"
        raise NotFound(f"there is no domain {domain!r}; known: {known}")
    with transaction(wheel.url) as connection:
        store = ReleaseStore(connection)
        # Read before the history: a change between the two makes the decision stale, not wrong.
        serving = store.current(tenant_id, domain, alias)
        history = store.changes(tenant_id, domain, alias, limit=_CHANGES_READ)
    _demand_left(domain, alias, serving, leaving)
    target, passed_over = _servable(wheel, tenant_id, earlier(history))
    why = "; ".join([reason, *passed_over])[:2_000]
    switch = _Switch(tenant_id, domain, alias, serving, by, why, AdapterStatus.ROLLED_BACK)
    with transaction(wheel.url) as connection:
        change = switch.to(target, connection, wheel.base)
        if change is None:
            raise switch.stale(connection)
        return change


def _demand_left(domain: str, alias: str, serving: str | None, leaving: str | None) -> None:
    if serving is None:
        raise Conflict(f"{alias} of {domain} resolves to the base model: nothing to roll back")
    if leaving not in (None, serving):
        raise Conflict(f"{alias} of {domain} resolves to {serving}, no longer to {leaving}")


def earlier(newest_first: Sequence[ReleaseView]) -> list[str]:
    """The adapters to go back to, the last one first; after them comes the base model.

    Going back is no step forward: what a rollback left is not gone back to.
    """
    released: list[str | None] = []
    for change in reversed(newest_first):
        if not released:
            released.append(change.before)
        if change.after in released:
            del released[released.index(change.after) + 1 :]
        else:
            released.append(change.after)
    return [name for name in reversed(released[:-1]) if name is not None]


def _servable(
    wheel: Wheel, tenant_id: TenantId, names: Sequence[str]
) -> tuple[Adapter | None, list[str]]:
    """The first that serves (None: the base), and why others were passed over."""
    passed_over: list[str] = []
    for name in names:
        with transaction(wheel.url) as connection:
            adapter = AdapterStore(connection).get(tenant_id, name)
        try:
            load(wheel, adapter)
        except EngineUnavailable as error:
            # Switching back must not wait for the engine: its files are whole and it is desired,
            # so the reconciler loads it as soon as there is an engine.
            log.warning("rolling back to %s without a probe: %s", name, error)
        except (AdapterRefused, ProbeFailed, EngineRefused, Conflict) as error:
            passed_over.append(f"{name} was passed over: {error}")
            continue
        return adapter, passed_over
    return None, passed_over


# ---------------------------------------------------------------- the switch


@dataclass(frozen=True, slots=True)
class _Switch:
    """Which alias is switched, from what, by whom and why."""

    tenant_id: TenantId
    domain: str
    alias: str
    serving: str | None
    """What the alias resolved to when this was decided; None: the base."""
    by: str
    reason: str
    left: AdapterStatus
    """Status of the adapter that the alias leaves, where no other alias resolves to it."""

    def to(
        self, adapter: Adapter | None, connection: Connection, base: Policy
    ) -> ReleaseView | None:
        """Switch to the adapter (None: the base), and keep the statuses true.

        None, and nothing is changed, where the alias resolves to something else than it did, or to
        the adapter already.
        """
        change = ReleaseStore(connection).switch(
            self.tenant_id,
            domain=self.domain,
            alias=self.alias,
            expected=self.serving,
            policy=None if adapter is None else as_json(policy_of(adapter)),
            fallback=as_json(base),
            by=self.by,
            reason=self.reason,
        )
        if change is None:
            return None
        store = AdapterStore(connection)
        if change.before is not None and not store.aliases(self.tenant_id, change.before):
            store.set_status(self.tenant_id, change.before, self.left)
        if adapter is not None:
            store.set_status(self.tenant_id, adapter.name, AdapterStatus.SERVING)
            store.set_loaded(self.tenant_id, adapter.name, True)
        return change

    def stale(self, connection: Connection) -> Conflict:
        """Says what was done to the alias meanwhile."""
        change = ReleaseStore(connection).newest(self.tenant_id, self.domain, self.alias)
        done = "without a record"
        if change is not None:
            after = change.after or "the base model"
            done = f"to {after} by {change.changed_by} ({change.reason[:200]})"
        return Conflict(
            f"{self.alias} of {self.domain} resolved to {self.serving or 'the base model'} when "
            f"this was decided and was switched {done} meanwhile; nothing was changed: decide anew"
        )
