"""`noria keys`: create, list and revoke API keys."""

from typing import Annotated

import typer
from rich.table import Column, Table

from deploy.cli.client import client, complete_key
from deploy.cli.output import console, print_json

key_commands = typer.Typer(help="API keys.", no_args_is_help=True)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@key_commands.command("create")
def create(
    name: Annotated[str, typer.Argument(help="Whom or what the key is for.")],
    scope: Annotated[list[str] | None, typer.Option(help="runs:write, runs:read, admin, …")] = None,
    as_json: Json = False,
) -> None:
    """Make a key. It is shown this once. Default scopes: runs:write and runs:read."""
    with client() as opened:
        made = opened.create_key(name, scope or ["runs:write", "runs:read"])
    if as_json:
        print_json(made.model_dump(mode="json"))
    else:
        console.print(made.key, highlight=False, soft_wrap=True)
        console.print(f"id {made.id}, scopes {', '.join(made.scopes)}; it is not shown again")


@key_commands.command("list")
def list_keys(as_json: Json = False) -> None:
    """All keys, without their secrets."""
    with client() as opened:
        keys = opened.list_keys()
    if as_json:
        print_json({"keys": [key.model_dump(mode="json") for key in keys]})
        return
    table = Table(Column("id", no_wrap=True), "name", "scopes", "created", "revoked")
    for key in keys:
        revoked = "" if key.revoked_at is None else f"{key.revoked_at:%Y-%m-%d %H:%M}"
        created = f"{key.created_at:%Y-%m-%d %H:%M}"
        table.add_row(key.id, key.name, " ".join(key.scopes), created, revoked)
    console.print(table)


@key_commands.command("revoke")
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", autocompletion=complete_key)],
) -> None:
    """End a key, in force within a second. Repeating it changes nothing."""
    with client() as opened:
        opened.revoke_key(key_id)
    console.print(f"revoked {key_id}", highlight=False)
