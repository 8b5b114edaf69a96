"""`noria adapters` and `noria release`: what was learnt, and what production is served by."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from deploy.cli.client import complete_adapter, complete_domain, wheel_client
from deploy.cli.output import console, print_json

if TYPE_CHECKING:
    from flywheel.schemas import AdapterView, ReleaseView

adapter_commands = typer.Typer(help="What was learnt.", no_args_is_help=True)
release_commands = typer.Typer(help="What production is served by.", no_args_is_help=True)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
OfDomain = Annotated[str | None, typer.Option("--domain", autocompletion=complete_domain)]
Adapter = Annotated[str, typer.Argument(metavar="ADAPTER", autocompletion=complete_adapter)]
Reason = Annotated[str, typer.Option(help="Why; it stands in the record.")]
Alias = Annotated[str, typer.Option(help="Which alias of the domain.")]


@adapter_commands.command("list")
def list_adapters(domain: OfDomain = None, as_json: Json = False) -> None:
    """Adapters, newest first."""
    with wheel_client() as opened:
        adapters = opened.adapters(domain)
    if as_json:
        print_json({"adapters": [each.model_dump(mode="json") for each in adapters]})
        return
    table = Table(Column("name", overflow="fold"), "domain", "stage", "status", "loaded", "made")
    for each in adapters:
        made = f"{each.created_at:%Y-%m-%d %H:%M}"
        loaded = "yes" if each.loaded else ""
        table.add_row(each.name, each.domain, each.stage, each.status, loaded, made)
    console.print(table)


@adapter_commands.command("show")
def show_adapter(name: Adapter, as_json: Json = False) -> None:
    """One adapter: where it comes from, how it was found, what the gate decided."""
    with wheel_client() as opened:
        adapter = opened.adapter(name)
    if as_json:
        print_json(adapter.model_dump(mode="json"))
        return
    table = Table(show_header=False, show_edge=False)
    for what, value in _facts(adapter):
        table.add_row(f"[bold]{what}[/bold]", escape(value))
    console.print(table)


def _facts(adapter: "AdapterView") -> list[tuple[str, str]]:
    facts = [
        ("name", adapter.name),
        ("digest", adapter.digest),
        ("domain", adapter.domain),
        ("stage", adapter.stage),
        ("status", f"{adapter.status}{', loaded' if adapter.loaded else ''}"),
        ("cycle", adapter.cycle_id or "none"),
    ]
    if (lineage := adapter.manifest) is not None:
        facts += [
            ("base", f"{lineage.base_name} {lineage.base}"),
            ("parent", lineage.parent or "none"),
            ("rank", str(lineage.rank)),
            ("trained on", f"{len(lineage.tasks)} pool tasks, {len(lineage.runs)} runs"),
            ("corrections", ", ".join(lineage.corrections[:5]) + _more(lineage.corrections)),
        ]
    if adapter.decision is not None:
        facts.append(("gate", f"{adapter.decision.outcome}: {' '.join(adapter.decision.reasons)}"))
    return facts


def _more(items: list[str]) -> str:
    return f" and {len(items) - 5} more" if len(items) > 5 else ""


# ---------------------------------------------------------------- releases


@release_commands.command("promote")
def promote(
    adapter: Adapter, reason: Reason, alias: Alias = "production", as_json: Json = False
) -> None:
    """Load an adapter, probe it, and let the alias resolve to it."""
    with wheel_client() as opened:
        _tell(opened.promote(adapter, alias=alias, reason=reason), as_json)


@release_commands.command("rollback")
def roll_back(
    domain: Annotated[str, typer.Argument(autocompletion=complete_domain)],
    reason: Reason,
    alias: Alias = "production",
    as_json: Json = False,
) -> None:
    """Let the alias resolve to what it resolved to before its last change."""
    with wheel_client() as opened:
        _tell(opened.roll_back(domain, alias=alias, reason=reason), as_json)


@release_commands.command("list")
def list_releases(domain: OfDomain = None, as_json: Json = False) -> None:
    """Who let which alias resolve to what, when and why; newest first."""
    with wheel_client() as opened:
        releases = opened.releases(domain)
    if as_json:
        print_json({"releases": [each.model_dump(mode="json") for each in releases]})
        return
    table = Table("at", "domain", "alias", Column("from → to", overflow="fold"), "by", "reason")
    for each in releases:
        change = f"{each.before or 'base'} → {each.after or 'base'}"
        at = f"{each.at:%Y-%m-%d %H:%M}"
        table.add_row(at, each.domain, each.alias, change, each.changed_by, escape(each.reason))
    console.print(table)


def _tell(release: "ReleaseView", as_json: bool) -> None:
    if as_json:
        print_json(release.model_dump(mode="json"))
        return
    served = release.after or "the base model"
    before = release.before or "the base model"
    console.print(f"{release.domain}/{release.alias}: {before} → {served}", soft_wrap=True)
    if release.repinned:
        console.print(f"{release.repinned} queued runs were pinned to it")
