"""`python -m runtime.engine.local MODEL_DIR`: serve a model folder until SIGTERM.

With `--fd` it serves an already bound socket, so that whoever spawned it knows the address before
it is ready; with `--lifeline` it stops when the other end of a pipe is closed, so that it cannot
outlive its parent. One line, `ready`, is printed once requests are answered.
"""

import argparse
import os
import signal
import socket
import threading
from pathlib import Path

from runtime.engine.local.batching import EngineLimits
from runtime.engine.local.server import serve


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.lifeline is not None:
        threading.Thread(target=_stop_at_end_of, args=(arguments.lifeline,), daemon=True).start()
    serve(
        arguments.model_dir,
        host=arguments.host,
        port=arguments.port,
        on_ready=lambda: print("ready", flush=True),
        limits=EngineLimits(
            sequences=arguments.sequences,
            waiting=arguments.waiting,
            threads=arguments.threads,
        ),
        listener=None if arguments.fd is None else socket.socket(fileno=arguments.fd),
    )


def _parser() -> argparse.ArgumentParser:
    defaults = EngineLimits()
    parser = argparse.ArgumentParser(prog="runtime.engine.local", description=__doc__)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8322)
    parser.add_argument("--fd", type=int, help="descriptor of a bound, listening socket")
    parser.add_argument("--lifeline", type=int, help="descriptor of a pipe; stop at its end")
    parser.add_argument("--threads", type=int, default=defaults.threads)
    parser.add_argument("--sequences", type=int, default=defaults.sequences)
    parser.add_argument("--waiting", type=int, default=defaults.waiting)
    return parser


def _stop_at_end_of(lifeline: int) -> None:
    while os.read(lifeline, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
