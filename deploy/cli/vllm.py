"""`noria vllm`: vLLM in an environment of its own, as the engine, until Ctrl-C."""

import asyncio
from typing import Annotated

import typer

from deploy.cli.output import console
from runtime.settings import load_settings

PORT = 8323


def vllm_command(
    context: typer.Context,
    cpu: Annotated[
        bool, typer.Option("--cpu", help="Serve on this machine's CPUs; else on its NVIDIA GPUs.")
    ] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port on the loopback; 0 picks a free one.")
    ] = PORT,
    max_loras: Annotated[int, typer.Option(min=1, help="Adapters in one batch.")] = 4,
    max_lora_rank: Annotated[
        int, typer.Option(min=1, help="Largest rank of an adapter; a smaller one is faster.")
    ] = 64,
    prepare_only: Annotated[
        bool, typer.Option("--prepare-only", help="Make the environment and stop there.")
    ] = False,
) -> None:
    """Serve the base model and its adapters with vLLM. Ctrl-C stops it.

    The first start installs vLLM in an environment of its own. Serving on GPUs is set up but has
    not been tried. Further arguments go to vLLM as they are.
    """
    from deploy.vllm import VllmOptions, prepare_vllm, serve_vllm

    settings = load_settings()
    if prepare_only:
        asyncio.run(prepare_vllm(settings, cpu=cpu, say=_say))
        return
    options = VllmOptions(
        cpu=cpu,
        port=port,
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
        more=tuple(context.args),
    )
    asyncio.run(serve_vllm(settings, options, _say))


def _say(text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)
