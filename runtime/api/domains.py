"""Routes of domains: what work there is, and the shape of its input and its answer."""

from typing import Annotated

from fastapi import APIRouter, Depends

from runtime.api.auth import Reader
from runtime.api.body import StrictRoute
from runtime.api.problems import answers
from runtime.api.schemas import DomainList, DomainSummary, DomainView
from runtime.api.services import ApiServices, services_of
from runtime.domain import Domain
from runtime.errors import NotFound

router = APIRouter(prefix="/v1/domains", tags=["domains"], route_class=StrictRoute)
Services = Annotated[ApiServices, Depends(services_of)]


@router.get("", summary="List domains", responses=answers(401, 403, 503))
async def list_domains(services: Services, caller: Reader) -> DomainList:
    return DomainList(domains=[_summary(domain) for domain in services.domains.values()])


@router.get("/{name}", summary="Read a domain", responses=answers(401, 403, 404, 503))
async def read_domain(services: Services, caller: Reader, name: str) -> DomainView:
    if (domain := services.domains.get(name)) is None:
        known = ", ".join(services.domains) or "none"
        raise NotFound(f"there is no domain {name[:80]!r}; known: {known}")
    return DomainView(
        **_summary(domain).model_dump(),
        input_schema=domain.input_schema,
        output_schema=domain.output_schema,
    )


def _summary(domain: Domain) -> DomainSummary:
    return DomainSummary(
        name=domain.name,
        title=domain.title,
        description=domain.description,
        digest=domain.digest,
        levels=list(domain.levels),
    )
