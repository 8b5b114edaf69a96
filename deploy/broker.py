"""What `worker` and `beat` have in common: the broker of the settings, and how Celery behaves here.

Scaling past one machine: NORIA_BROKER_URL names a Valkey, Redis or RabbitMQ that all workers reach.
"""

import logging
import warnings

from celery import Celery, signals

from flywheel.jobs import celery_app
from runtime.errors import StoreError
from runtime.settings import Settings


def broker(settings: Settings) -> Celery:
    """The Celery app of the broker in the settings. Raises StoreError where none is named."""
    if settings.broker_url is None:
        raise StoreError("NORIA_BROKER_URL is not set; `noria up` sets it for the embedded stack")
    return celery_app(settings.broker_url)


def keep_quiet() -> None:
    """Logging stays as the process set it up; the warning about root is for pickle's sake."""
    signals.setup_logging.connect(lambda **_: None, weak=False)
    logging.getLogger("celery").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message="You're running the worker with superuser")
