"""The registry of adapters: content-addressed weights with their lineage, one row each.

What a trainer left is taken in once: its files are judged before anything loads them, its digest
makes its name, its lineage becomes `manifest.json`, and the points at which trainer and engine must
agree become `probe.json`. Row, policy and folder appear together or not at all; the same weights
again are the same adapter. An adapter is reached by its name in the registry, never by a path that
a request names.

Scaling out: rows are shared through Postgres, folders through the shelf's storage.
"""

import datetime as dt
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from flywheel.records import Adapter, AdapterStatus, Decision, Lineage, Manifest
from flywheel.release import shelf
from flywheel.release.inspection import (
    CONFIG,
    WEIGHTS,
    base_shapes,
    inspect_weights,
    normalised,
    rank_of,
    read_config,
)
from flywheel.store import Connection, Statements, as_json, transaction
from flywheel.training.job import ProbePoint
from flywheel.wheel import Wheel
from runtime.errors import AdapterRefused, NotFound
from runtime.run import Policy, PolicyId, TenantId

MANIFEST = "manifest.json"
PROBE = "probe.json"
_NAMES_SHOWN = 10
_points = TypeAdapter[list[ProbePoint]](list[ProbePoint])


# ---------------------------------------------------------------- rows


class AdapterStore(Statements):
    """The rows, over one open transaction."""

    FILE = "adapters.sql"

    def insert(self, adapter: Adapter) -> bool:
        """Store it and its policy; False where the tenant's domain has these weights already."""
        row = self._one(
            "insert_adapter",
            tenant_id=adapter.tenant_id,
            name=adapter.name,
            digest=adapter.digest,
            base=adapter.base,
            domain=adapter.domain,
            folder=adapter.folder,
            stage=adapter.stage,
            cycle_id=adapter.cycle_id,
            manifest=as_json(adapter.manifest),
        )
        if row is None:
            return False
        policy = as_json(policy_of(adapter))
        self._run("register_policy", tenant_id=adapter.tenant_id, policy=policy)
        return True

    def get(self, tenant_id: TenantId, name: str) -> Adapter:
        """Raises NotFound, naming the newest ones that exist."""
        row = self._one("get_adapter", tenant_id=tenant_id, name=name)
        if row is not None:
            return Adapter.model_validate(row)
        known = ", ".join(a.name for a in self.page(tenant_id, limit=_NAMES_SHOWN)) or "none"
        raise NotFound(f"there is no adapter {name[:200]!r}; the newest: {known}")

    def by_digest(self, tenant_id: TenantId, domain: str, digest: str) -> Adapter | None:
        row = self._one("find_by_digest", tenant_id=tenant_id, domain=domain, digest=digest)
        return None if row is None else Adapter.model_validate(row)

    def page(
        self, tenant_id: TenantId, domain: str | None = None, *, limit: int = 100
    ) -> list[Adapter]:
        """Newest first."""
        rows = self._all("list_adapters", tenant_id=tenant_id, domain=domain, limit=limit)
        return [Adapter.model_validate(row) for row in rows]

    def desired(self) -> list[Adapter]:
        """Every tenant's loaded or aliased adapters: aliased ones first, then the newest."""
        return [Adapter.model_validate(row) for row in self._all("desired_adapters")]

    def residents(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Rows for `hot_load.Resident`, the oldest first."""
        return self._all("residents", names=list(names))

    def aliases(self, tenant_id: TenantId, name: str) -> list[tuple[str, str]]:
        """(domain, alias) of every alias that resolves to the adapter."""
        rows = self._all("aliases_of", tenant_id=tenant_id, name=name)
        return [(row["domain"], row["alias"]) for row in rows]

    def set_loaded(self, tenant_id: TenantId, name: str, loaded: bool) -> None:
        """Say whether the reconciler shall keep it resident; it keeps what is aliased anyway."""
        self._run("set_loaded", tenant_id=tenant_id, name=name, loaded=loaded)

    def set_status(self, tenant_id: TenantId, name: str, status: AdapterStatus) -> None:
        self._run("set_status", tenant_id=tenant_id, name=name, status=status)

    def set_decision(self, tenant_id: TenantId, name: str, decision: Decision) -> None:
        """Keep the gate's decision; a candidate it rejects becomes `rejected`."""
        self._run(
            "set_decision",
            tenant_id=tenant_id,
            name=name,
            decision=as_json(decision),
            outcome=decision.outcome,
        )


def policy_of(adapter: Adapter) -> Policy:
    """What a run that uses the adapter is pinned to."""
    return Policy(id=PolicyId(adapter.name), base=adapter.base, adapter=adapter.digest)


# ---------------------------------------------------------------- registering


def register(
    wheel: Wheel,
    tenant_id: TenantId,
    folder: Path,
    lineage: Lineage,
    probe: Sequence[ProbePoint],
    *,
    at: dt.datetime | None = None,
) -> Adapter:
    """Take in what a trainer left in `folder`; the adapter there was, where it is known already.

    Raises AdapterRefused, each fault with its reason, or StoreError where it cannot be saved; then
    nothing is registered and nothing is left behind.
    """
    if not probe:
        raise AdapterRefused(
            "an adapter needs at least one probe point: without, nobody can tell whether an "
            "engine serves it",
            reason="no_probe",
        )
    with shelf.part(wheel.adapters) as part:
        rank = _take_in(wheel, folder, part, lineage)
        adapter = _described(wheel, tenant_id, shelf.digest_of(part), lineage, rank, at)
        shelf.write(part, MANIFEST, adapter.manifest.model_dump_json(indent=1).encode())
        shelf.write(part, PROBE, _points.dump_json(list(probe)))
        with transaction(wheel.url) as connection:
            return _record(connection, adapter, part)


def _take_in(wheel: Wheel, source: Path, part: Path, lineage: Lineage) -> int:
    """Copy the two files into the part and judge the copies; returns the rank."""
    shelf.refuse_pickles(source)
    config = read_config(shelf.read_small(source, CONFIG))
    rank = rank_of(config, lineage.recipe.lora.rank if lineage.recipe else None)
    shelf.copy(source, part, WEIGHTS)
    inspect_weights(part / WEIGHTS, rank, base_shapes(wheel.model_dir))
    shelf.write(part, CONFIG, normalised(config, wheel.base.id))
    return rank


def _described(
    wheel: Wheel,
    tenant_id: TenantId,
    digest: str,
    lineage: Lineage,
    rank: int,
    at: dt.datetime | None,
) -> Adapter:
    created = at or dt.datetime.now(dt.UTC)
    name = f"{lineage.domain}-{created:%Y%m%d}-{digest.removeprefix('sha256:')[:12]}"
    manifest = Manifest(
        name=name,
        digest=digest,
        base=wheel.base.base,
        base_name=wheel.base.id,
        rank=rank,
        created_at=created,
        **dict(lineage),
    )
    return Adapter(
        tenant_id=tenant_id,
        name=name,
        digest=digest,
        base=wheel.base.base,
        domain=lineage.domain,
        folder=str(wheel.adapters / name),
        stage=lineage.stage,
        cycle_id=lineage.cycle_id,
        status=AdapterStatus.CANDIDATE,
        loaded=False,
        manifest=manifest,
        created_at=created,
    )


def _record(connection: Connection, adapter: Adapter, part: Path) -> Adapter:
    """Row, policy and folder, in one transaction; an equal insert elsewhere waits for its end."""
    store = AdapterStore(connection)
    if store.insert(adapter):
        shelf.place(part, adapter.name)
        return store.get(adapter.tenant_id, adapter.name)
    known = store.by_digest(adapter.tenant_id, adapter.domain, adapter.digest)
    if known is None:
        raise AdapterRefused(
            f"the name {adapter.name!r} is taken by other weights", reason="name_taken"
        )
    return known


# ---------------------------------------------------------------- reading back


def verify(adapter: Adapter) -> None:
    """Demand that its files are still those registered. Raises AdapterRefused."""
    folder = Path(adapter.folder)
    found = shelf.digest_of(folder)
    if found != adapter.digest:
        raise AdapterRefused(
            f"the files of {adapter.name} changed after it was registered: their digest is "
            f"{found}, the registered one {adapter.digest}; restore them from a backup or "
            "release another adapter",
            reason="changed",
        )


def probe_points(adapter: Adapter) -> list[ProbePoint]:
    """Where engine and trainer must agree. Raises AdapterRefused where they cannot be read."""
    content = shelf.read_small(Path(adapter.folder), PROBE)
    try:
        return _points.validate_json(content)
    except ValidationError as error:
        raise AdapterRefused(
            f"{PROBE} of {adapter.name} is damaged: {error.errors()[0]['msg']}", reason="changed"
        ) from error
