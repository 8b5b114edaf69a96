"""Brings the database to where the other processes can start; apart from `composition`, because
every start waits for it and it needs none of what runs need.

Scaling past one machine: it may run from anywhere, any number of times, also at once; migrations
take turns under an advisory lock.
"""

from flywheel.store import MIGRATIONS
from runtime.database import Database, migrate
from runtime.errors import StoreError
from runtime.key_store import bootstrap_key
from runtime.settings import Settings


async def prepare_database(settings: Settings) -> list[str]:
    """Bring the schema up to date and see that the home has its key; the migrations applied.

    Raises StoreError where no database is named or it cannot be used.
    """
    if settings.database_url is None:
        raise StoreError("NORIA_DATABASE_URL is not set; `noria migrate` starts the embedded one")
    url = settings.database_url
    applied = await migrate(url)
    applied += await migrate(url, folder=MIGRATIONS, schema="flywheel")
    async with Database(url, size=1) as database:
        await bootstrap_key(database, settings.home / "secrets")
    return applied
