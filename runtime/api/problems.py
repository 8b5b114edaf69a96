"""Errors as RFC 9457 problems: one shape for everything that goes wrong.

A failure keeps the vocabulary of `runtime.errors`: its code becomes the problem's type, its message
the detail. What the caller cannot mend (a bug) tells nothing but the number under which the log has
the cause.
"""

import logging
import secrets
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from runtime.api.schemas import FieldProblem, Problem
from runtime.errors import EngineError, InputError, StoreError

log = logging.getLogger(__name__)
MEDIA_TYPE = "application/problem+json"
MAX_ERRORS = 50
MAX_TEXT = 300
"""Characters of one field's path or message."""
RETRY_SECONDS = 1


class Refused(HTTPException):
    """A request the API itself refuses; `code` is stable and snake_case."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        errors: Sequence[FieldProblem] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, detail, headers)
        self.code = code
        self.errors = errors


def problem(
    status: int,
    code: str,
    detail: str,
    *,
    errors: Sequence[FieldProblem] = (),
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    body = Problem(
        type=f"urn:noria:problem:{code}",
        title=HTTPStatus(status).phrase,
        status=status,
        detail=detail,
        errors=list(errors[:MAX_ERRORS]),
    )
    return JSONResponse(
        body.model_dump(exclude_defaults=True), status, headers=headers, media_type=MEDIA_TYPE
    )


def install(app: FastAPI) -> None:
    """Make every error of the app a problem."""
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(HTTPException, _unroutable)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(InputError, _unusable)
    app.add_exception_handler(StoreError, _away)
    app.add_exception_handler(EngineError, _engine_failed)
    app.add_exception_handler(Exception, _unexpected)


async def _refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Refused)
    return problem(
        error.status_code, error.code, error.detail, errors=error.errors, headers=error.headers
    )


async def _unroutable(request: Request, error: Exception) -> JSONResponse:
    """What the framework refuses by itself: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:MAX_TEXT]
    detail, code = str(error.detail), HTTPStatus(error.status_code).name.lower()
    if error.status_code == HTTPStatus.NOT_FOUND:
        detail = f"there is nothing at {path}"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (error.headers or {}).get("Allow", "another method")
        detail = f"{path} does not take {request.method[:MAX_TEXT]}; allowed: {allowed}"
    return problem(error.status_code, code, detail, headers=error.headers)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return await _refused(request, wrong_fields(error.errors()))


def wrong_fields(errors: Sequence[Mapping[str, Any]]) -> Refused:
    """What the framework's validator found, as a refusal (422) that names each wrong field."""
    wrong = [_field_problem(each) for each in errors[:MAX_ERRORS]]
    shown = "; ".join(f"{each.field}: {each.message}" for each in wrong[:5])
    more = f"; and {len(errors) - 5} more" if len(errors) > 5 else ""
    return Refused(422, InputError.code, shown + more, errors=wrong)


def _field_problem(error: Mapping[str, Any]) -> FieldProblem:
    kind, *within = error["loc"]  # body, query, header or path, and where in it
    where = [str(part) for part in within if part != "[key]"]
    message = str(error["msg"]).removeprefix("Value error, ")
    return FieldProblem(field=".".join(where)[:MAX_TEXT] or str(kind), message=message[:MAX_TEXT])


async def _unusable(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, InputError)
    wrong = [FieldProblem.model_validate(each) for each in error.detail.get("errors", [])]
    return problem(error.http_status, error.code, str(error), errors=wrong)


async def _away(request: Request, error: Exception) -> JSONResponse:
    log.warning("%s %s: %s", request.method, request.url.path, error)
    detail = "the database is away; the same request may succeed in a moment"
    return problem(503, StoreError.code, detail, headers={"Retry-After": str(RETRY_SECONDS)})


async def _engine_failed(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, EngineError)
    log.warning("%s %s: %s", request.method, request.url.path, error)
    if error.retriable:
        headers = {"Retry-After": str(RETRY_SECONDS)}
        return problem(503, error.code, str(error), headers=headers)
    return problem(502, error.code, str(error))


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    number = secrets.token_hex(6)
    log.error("%s %s failed (%s)", request.method, request.url.path, number, exc_info=error)
    detail = f"an unexpected error; the server's log has its cause under {number}"
    return problem(500, "internal_error", detail)


# ---------------------------------------------------------------- OpenAPI

DESCRIPTIONS = {
    400: "The body or a header is not what it should be",
    401: "No key, or one that is unknown, revoked or expired",
    403: "The key lacks a scope",
    404: "There is no such thing in the key's tenant",
    409: "The state does not allow this",
    413: "The body is too large",
    415: "The body is not JSON",
    422: "The request is well-formed, but wrong; `errors` names each field",
    502: "The engine answered otherwise than it must",
    503: "A part is away; retry after `Retry-After` seconds",
}


def answers(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """`responses=` of a route: the problems it may answer with."""
    return {s: {"model": Problem, "description": DESCRIPTIONS[s]} for s in statuses}


def as_problem_json(document: dict[str, Any]) -> dict[str, Any]:
    """Give every problem of an OpenAPI document its media type.

    The framework's own answer to wrong fields, which no route gives, is taken out.
    """
    for path in document["paths"].values():
        for operation in path.values():
            responses = operation["responses"]
            for status in [s for s, r in responses.items() if _schema(r) == "HTTPValidationError"]:
                del responses[status]
            for response in responses.values():
                if _schema(response) == "Problem":
                    content = response["content"]
                    content[MEDIA_TYPE] = content.pop("application/json")
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    return document


def _schema(response: dict[str, Any]) -> str:
    """The name of the schema that an answer refers to."""
    content = response.get("content", {}).get("application/json", {})
    return content.get("schema", {}).get("$ref", "").rpartition("/")[2]
