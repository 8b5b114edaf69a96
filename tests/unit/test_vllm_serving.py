"""How vLLM is started, watched and stopped, with a small HTTP server in its place."""

import json
import socket
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from deploy.children import ChildFailed
from deploy.home import CannotRun, Home
from deploy.vllm import HOST, VllmOptions, running_vllm, vllm_arguments, vllm_variables
from deploy.vllm_environment import VllmEnvironment
from runtime.engine.openai import OpenAIEngine
from runtime.settings import Settings

pytestmark = pytest.mark.model
OPTIONS = VllmOptions(cpu=True, port=0)
SERVER = """
import http.server, os, sys
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
open(os.path.join(os.environ["TMPDIR"], "left"), "w").close()
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Healthy).serve_forever()
"""


@pytest.fixture
def settings(model_dir: Path) -> Iterator[Settings]:
    """A home with the real model's folder in it, and a place for short folders of its own."""
    with tempfile.TemporaryDirectory(prefix="noria-v-") as folder:
        home, short = Path(folder, "home"), Path(folder, "s")
        short.mkdir()
        settings = Settings(home=home, runtime_dir=short)
        Home.of(settings).create()
        (home / "models").symlink_to(model_dir.parent)
        yield settings


def install(settings: Settings, program: str) -> VllmEnvironment:
    """An environment without a stamp, whose Python is a shell script."""
    environment = VllmEnvironment.of(Home.of(settings), cpu=True)
    environment.python.parent.mkdir(parents=True)
    environment.python.write_text(f"#!/bin/sh\n{program}\n")
    environment.python.chmod(0o755)
    return environment


def install_server(settings: Settings) -> None:
    code = settings.home / "server.py"
    code.write_text(SERVER)
    install(settings, f'exec {sys.executable} {code} "$@"')


async def test_it_serves_until_the_block_ends_and_leaves_nothing(settings: Settings) -> None:
    install_server(settings)
    async with running_vllm(settings, OPTIONS) as (child, url):
        left = list(settings.runtime_dir.rglob("left"))
        assert len(left) == 1, "what it writes aside goes to its short folder"
        async with OpenAIEngine(url) as engine:
            assert await engine.healthy()
    assert child.exited.done()
    assert list(settings.runtime_dir.iterdir()) == []


async def test_there_is_one_in_a_home(settings: Settings) -> None:
    install_server(settings)
    async with running_vllm(settings, OPTIONS):
        with pytest.raises(CannotRun, match=r"served from .* already"):
            async with running_vllm(settings, OPTIONS):
                pass
    async with running_vllm(settings, OPTIONS):
        pass


async def test_a_start_that_fails_tells_its_last_words(settings: Settings) -> None:
    install(settings, 'echo "no room for the KV cache" >&2; exit 3')
    with pytest.raises(ChildFailed, match=r"(?s)status 3; the end of .*no room for the KV cache"):
        async with running_vllm(settings, OPTIONS):
            pass


async def test_a_taken_port_is_named(settings: Settings) -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CannotRun, match=f"port {port} is taken"):
            async with running_vllm(settings, VllmOptions(cpu=True, port=port)):
                pass


def test_vllm_is_told_no_secrets(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORIA_API_KEY", "secret")
    monkeypatch.setenv("DATABASE_URL", "secret")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    variables = vllm_variables(Home.of(settings), cpu=True)
    assert "secret" not in variables.values()
    assert variables["VLLM_CPU_KVCACHE_SPACE"] == "7", "the operator's value wins"
    assert "TORCH_COMPILE_DISABLE" not in vllm_variables(Home.of(settings), cpu=False)


def test_a_batch_on_a_cpu_holds_the_longest_prompt(model_dir: Path, tmp_path: Path) -> None:
    for window, held in ((4096, "4096"), (131_072, "8192")):
        (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": window}))
        arguments = vllm_arguments(tmp_path, 1, OPTIONS)
        pairs = dict(pairwise(arguments))
        assert pairs["--max-model-len"] == pairs["--max-num-batched-tokens"] == held
    assert model_dir.name in vllm_arguments(model_dir, 1, OPTIONS)


def test_a_half_made_environment_is_not_whole(settings: Settings) -> None:
    environment = install(settings, "exit 0")
    assert not environment.whole()
    environment.stamp.write_text(json.dumps({"pins": "of another version"}))
    assert not environment.whole()
