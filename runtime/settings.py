"""The only reader of the environment.

Every process reads its settings once, at start, through `load_settings()`. Defaults are the
embedded stack under one data directory; URLs in the environment turn the same processes into
production.
"""

import os
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, AliasChoices, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from runtime.errors import InputError

CLONE = Path(__file__).resolve().parent.parent
"""Root of the source tree this process runs from."""

Absolute = Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())]
"""A path that means the same wherever a child process runs."""


class Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="NORIA_", frozen=True, extra="ignore", populate_by_name=True
    )

    home: Absolute = CLONE / ".noria"
    """Data directory: everything Noria creates outside `.venv/` lives here."""
    runtime_dir: Absolute = Path("/tmp")
    """Folder in which `up` makes its short private folder of sockets; at most 60 bytes long."""
    database_url: str | None = Field(
        default=None, validation_alias=AliasChoices("NORIA_DATABASE_URL", "DATABASE_URL")
    )
    """Postgres; None means the embedded one."""
    broker_url: str | None = None
    """Celery's broker; None means the embedded Valkey."""
    engine_url: str | None = None
    """OpenAI-compatible base URL (`http://host:port/v1`); None means the embedded engine."""
    engine_key: SecretStr | None = None
    model: str | None = None
    """Hub id or folder of the base model; None means the packaged SmolLM2-135M-Instruct."""
    host: str = "127.0.0.1"
    port: int = Field(default=8321, ge=0, le=65535)
    """Port of the API; 0 picks a free one."""
    domains: Path | None = None
    """Folder of the operator's own domains, beside the built-in ones."""
    concurrency: int = Field(default=32, ge=1, le=1000)
    """Runs one runner process executes at once."""
    lease_seconds: float = Field(default=15.0, gt=0)
    """How long a silent runner keeps its runs."""
    api_url: str | None = None
    """Where the CLI and the UI find the API; None means the running `up` of this home."""
    api_key: SecretStr | None = None
    """None means the bootstrap key of this home."""
    test_data: Path = Path("../shared/data")
    """Real task data for tests; tests skip where it is absent."""
    sandbox_uid: int = 64_123
    """Uid that sandboxed commands drop to where Noria runs as root."""
    service_uid: int = 64_124
    """Uid that the embedded Postgres and Valkey drop to where Noria runs as root."""
    postgres_bin: Absolute | None = None
    """Folder with `postgres` and `initdb` (14 or newer); None means the packaged ones."""
    valkey_bin: Absolute | None = None
    """A valkey-server or redis-server program (7 or newer); None means the packaged one."""
    bwrap: Absolute | None = None
    """A bubblewrap program with overlay support (0.11 or newer); None means the packaged one."""
    notify_fd: int | None = None
    """Socket on which a child tells its supervisor that it is ready; set by the supervisor."""
    listen_fd: int | None = None
    """Listening socket that the API inherits instead of binding host and port; likewise."""


def load_settings() -> Settings:
    """This process's settings. Raises InputError naming every variable that cannot be read."""
    try:
        return Settings()
    except ValidationError as error:
        wrong = [f"{_variable(each['loc'])}: {each['msg']}" for each in error.errors()]
        raise InputError("; ".join(wrong)) from error


def _variable(where: tuple[int | str, ...]) -> str:
    return f"NORIA_{str(where[0]).upper().removeprefix('NORIA_')}"


def child_environment(**changes: str | None) -> dict[str, str]:
    """This process's environment with `changes` (None removes), for a child to be started with."""
    merged: dict[str, str | None] = {**os.environ, "NORIA_NOTIFY_FD": None, "NORIA_LISTEN_FD": None}
    merged |= changes
    return {name: value for name, value in merged.items() if value is not None}
