"""Every sandbox back end, real and fake, against the shipped contract."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from runtime.sandbox.bubblewrap import BubblewrapBackend
from runtime.sandbox.contract import CONTRACT, Case
from runtime.sandbox.protocol import SandboxBackend
from runtime.sandbox.testing import MemoryBackend
from runtime.settings import load_settings


@pytest.fixture(params=["bubblewrap", "bubblewrap without cgroups", "memory"])
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SandboxBackend]:
    settings = load_settings()
    made: SandboxBackend
    if request.param == "memory":
        made = MemoryBackend(state_dir=tmp_path)
    else:
        made = BubblewrapBackend(
            state_dir=tmp_path,
            bwrap=settings.bwrap,
            uid=settings.sandbox_uid,
            use_cgroups=request.param == "bubblewrap",
        )
    yield made
    await made.close()


@pytest.mark.parametrize("case", CONTRACT, ids=lambda case: case.name)
async def test_contract(case: Case, backend: SandboxBackend) -> None:
    if isinstance(backend, MemoryBackend) and case.needs & backend.unsupported:
        pytest.skip(f"the fake has no {', '.join(sorted(case.needs & backend.unsupported))}")
    await case.check(backend)
