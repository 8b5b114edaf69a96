"""The shipped system-call filter is what its source builds."""

import platform
from pathlib import Path

import pytest

from runtime.sandbox.profile import seccomp_filter


@pytest.mark.skipif(platform.machine() != "x86_64", reason="built on the machine it is for")
def test_the_shipped_bytes_are_what_the_source_builds(tmp_path: Path) -> None:
    pytest.importorskip(
        "pyseccomp", reason="only its developers have pyseccomp", exc_type=Exception
    )
    from runtime.sandbox.seccomp_build import build

    with (tmp_path / "built.bpf").open("wb") as file:
        build().export_bpf(file)
    shipped = seccomp_filter()
    assert shipped is not None
    assert (tmp_path / "built.bpf").read_bytes() == shipped.read_bytes()
