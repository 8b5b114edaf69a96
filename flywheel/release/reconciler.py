"""Loaded adapters are desired state: what an engine forgot, it is told again.

An engine that restarts serves the base alone; runs pinned to an adapter wait for a while
(`PolicyNotLoaded` is retried). Whatever should be resident and is not is verified, loaded and
probed, what aliases resolve to first. An adapter that cannot serve any more is no longer desired,
and an alias that resolves to it is rolled back, since production must resolve to something that
answers.

Scaling out: any number of workers may reconcile at once; loading what is loaded is no error.
"""

import logging

from flywheel.records import Adapter
from flywheel.release import shelf
from flywheel.release.adapters import AdapterStore
from flywheel.release.aliases import roll_back
from flywheel.release.hot_load import serve, withdraw
from flywheel.store import transaction
from flywheel.wheel import Wheel
from runtime.errors import (
    AdapterRefused,
    Conflict,
    EngineError,
    EngineGarbage,
    EngineRefused,
    EngineUnavailable,
    NoriaError,
    ProbeFailed,
)

log = logging.getLogger(__name__)
BY = "reconciler"


def reconcile(wheel: Wheel) -> list[str]:
    """Load what should be resident and is not; the names loaded now.

    An engine that is away, or goes away meanwhile, ends it quietly: the next call goes on.
    """
    for name in shelf.sweep(wheel.adapters):
        log.info("swept %s, left by a process that died", name)
    with transaction(wheel.url) as connection:
        desired = AdapterStore(connection).desired()
    if not desired or not wheel.bridge.call(wheel.engine.healthy()):
        return []
    try:
        served = set(wheel.bridge.call(wheel.engine.models()))
        missing = [adapter for adapter in desired if adapter.name not in served]
        return [adapter.name for adapter in missing if _restored(wheel, adapter)]
    except (EngineUnavailable, EngineGarbage) as error:
        log.warning("the engine went away while adapters were loaded: %s", error)
        return []


def _restored(wheel: Wheel, adapter: Adapter) -> bool:
    try:
        serve(wheel, adapter)
    except (EngineUnavailable, EngineGarbage):
        raise
    except (EngineError, AdapterRefused, Conflict) as error:
        log.error("%s cannot be served: %s", adapter.name, error)
        if _is_its_own_fault(error):
            _give_up(wheel, adapter, str(error))
        return False
    log.info("%s is served again", adapter.name)
    return True


def _is_its_own_fault(error: NoriaError) -> bool:
    """False where the engine's state or settings are to blame: then it stays desired."""
    refused_files = isinstance(error, EngineRefused) and error.detail.get("status") == 400
    return refused_files or isinstance(error, AdapterRefused | ProbeFailed)


def _give_up(wheel: Wheel, adapter: Adapter, reason: str) -> None:
    """Roll back its aliases; one that cannot be keeps it desired: the next call tries again."""
    with transaction(wheel.url) as connection:
        aliases = AdapterStore(connection).aliases(adapter.tenant_id, adapter.name)
    for domain, alias in aliases:
        try:
            roll_back(
                wheel,
                adapter.tenant_id,
                domain,
                alias=alias,
                by=BY,
                reason=reason[:500],
                leaving=adapter.name,
            )
        except NoriaError as error:
            log.error("%s of %s could not be rolled back: %s", alias, domain, error)
    withdraw(wheel, adapter)
