"""`noria domain`: list and show domains, and certify one without a model."""

import asyncio
import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from deploy.cli.client import client, complete_domain
from deploy.cli.output import console, print_json
from runtime.settings import load_settings

domain_commands = typer.Typer(help="Kinds of work.", no_args_is_help=True)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Name = Annotated[str, typer.Argument(metavar="NAME", autocompletion=complete_domain)]


@domain_commands.command("list")
def list_domains(as_json: Json = False) -> None:
    """All domains."""
    with client() as opened:
        domains = list(opened.domains())
    if as_json:
        print_json({"domains": [domain.model_dump(mode="json") for domain in domains]})
        return
    table = Table("domain", "title", "levels", "digest")
    for domain in domains:
        table.add_row(domain.name, domain.title, " ".join(domain.levels), domain.digest[:19])
    console.print(table)


@domain_commands.command("show")
def show(name: Name, as_json: Json = False) -> None:
    """One domain: what it is for, and the shape of its input and its answer."""
    with client() as opened:
        domain = opened.domain(name)
    if as_json:
        print_json(domain.model_dump(mode="json"))
        return
    console.print(f"[bold]{domain.name}[/bold]: {domain.title}\n{domain.description}")
    for what, schema in (("input", domain.input_schema), ("answer", domain.output_schema)):
        console.print(f"[bold]{what}[/bold]")
        console.print_json(json.dumps(schema))


@domain_commands.command("validate")
def validate(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]…", autocompletion=complete_domain)
    ] = None,
    sample: Annotated[int, typer.Option(min=1, help="Tasks to certify on.")] = 40,
    seed: Annotated[int, typer.Option(help="Which tasks.")] = 0,
    as_json: Json = False,
) -> None:
    """Certify domains (all, where none is named) without a model. Status 1 unless all hold."""
    from deploy.composition import certify_domains

    found = asyncio.run(certify_domains(load_settings(), names or [], sample=sample, seed=seed))
    if as_json:
        print_json({"domains": [each.model_dump(mode="json") for each in found]})
    else:
        for each in found:
            _print_certification(each)
    raise typer.Exit(0 if all(each.certified for each in found) else 1)


def _print_certification(each: "Certification") -> None:
    verdict = "[green]certified[/green]" if each.certified else "[bold red]not certified[/bold red]"
    console.print(f"[bold]{each.name}[/bold] ({each.level}, {each.tasks} tasks): {verdict}")
    table = Table("attempt", "passed", "of", show_edge=False)
    for kind in ("gold", "empty", "do_nothing", "random"):
        rate = getattr(each, kind)
        table.add_row(kind, str(rate.passed), str(rate.n))
    console.print(table)
    for measure in ("no_lookup", "keyword", "decided_by_state", "decided_by_attachment"):
        value = getattr(each, measure)
        if value is not None:
            console.print(f"{measure}: {value:.1%}")
    for failure in each.failures:
        console.print(f"[red]{failure}[/red]")


if TYPE_CHECKING:
    from runtime.checks.certification import Certification
