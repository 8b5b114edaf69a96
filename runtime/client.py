"""The typed client of the REST API: what the CLI, the UI and applications use.

Blocking, over httpx; it shares the schemas with the server and imports nothing else of it. Every
run is created under an idempotency key, so that a lost answer is asked for again and never makes a
second run. Connect errors, 429 and 503 are retried with growing, jittered pauses; an answer lost on
its way only where asking again is safe. Event iterators reconnect where they were cut.
"""

import random
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from runtime.api.schemas import (
    CreateKey,
    CreateRun,
    DomainList,
    DomainSummary,
    DomainView,
    EventView,
    FeedbackTaken,
    FieldProblem,
    GiveFeedback,
    KeyCreated,
    KeyList,
    KeyView,
    Problem,
    RunPage,
    RunView,
    Scope,
    Trajectory,
)
from runtime.run import Finished, Json, RunKind, RunState

RETRIES = 5
FIRST_PAUSE = 0.2
"""Seconds before the first retry; doubled for each further one."""
LONGEST_PAUSE = 10.0
STREAM_SILENCE = 45.0
"""Seconds without a heartbeat after which a stream counts as cut."""
_WORTH_RETRYING = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)

_View = TypeVar("_View", bound=BaseModel)


class ApiProblem(Exception):
    """The API refused, or failed; its text is for people.

    `status` is the HTTP status, 0 where no answer came.
    """

    def __init__(
        self, status: int, title: str, detail: str, errors: Sequence[FieldProblem] = ()
    ) -> None:
        super().__init__(f"{title} ({status}): {detail}" if status else f"{title}: {detail}")
        self.status = status
        self.title = title
        self.detail = detail
        self.errors = list(errors)


class ApiUnreachable(ApiProblem):
    """No answer came, after retries."""

    def __init__(self, base_url: str, error: httpx.TransportError) -> None:
        detail = f"no answer from {base_url}: {error or type(error).__name__}"
        super().__init__(0, "API unreachable", detail)


class NoriaClient:
    """Use as a context manager; safe to share between threads.

    `timeout` is in seconds and per answer. `transport` and `pause` are for tests and for callers
    that bring their own.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str,
        *,
        timeout: float = 30.0,
        retries: int = RETRIES,
        transport: httpx.BaseTransport | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._timeout = timeout
        self._retries = retries
        self._pause = pause
        self._http = httpx.Client(
            base_url=base_url,
            headers={"Authorization": f"Bearer {api_key}"},
            timeout=timeout,
            transport=transport,
            trust_env=httpx.URL(base_url).host not in ("127.0.0.1", "localhost", "::1"),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    # ------------------------------------------------------------ runs

    def create_run(
        self,
        domain: str,
        input: Mapping[str, Json],
        *,
        files: Mapping[str, bytes] | None = None,
        kind: RunKind | str = RunKind.PRODUCTION,
        wait: bool = False,
        idempotency_key: str | None = None,
        **options: Any,
    ) -> RunView:
        """Admit one task; with `wait`, come back when it is over or `wait_seconds` have passed.

        `options` are the further fields of `CreateRun`. Raises ApiProblem, also for an option that
        does not exist.
        """
        values = {"domain": domain, "input": dict(input), "kind": kind, **options}
        request = checked(
            CreateRun,
            {**values, "files": dict(files or {}), "mode": "wait" if wait else "background"},
        )
        answer = self._call(
            "POST",
            "/v1/runs",
            body=request,
            headers={"Idempotency-Key": idempotency_key or secrets.token_hex(16)},
            timeout=self._timeout + (request.wait_seconds if wait else 0.0),
            repeatable=True,
        )
        return read(RunView, answer)

    def run(self, run_id: str) -> RunView:
        return read(RunView, self._call("GET", f"/v1/runs/{segment(run_id)}"))

    def runs(
        self,
        *,
        domain: str | None = None,
        state: RunState | str | None = None,
        kind: RunKind | str | None = None,
        page_size: int = 50,
    ) -> Iterator[RunView]:
        """Newest first, fetching page after page as they are needed."""
        wanted = {"domain": domain, "state": state, "kind": kind, "limit": page_size}
        query = {name: str(value) for name, value in wanted.items() if value is not None}
        while True:
            page = read(RunPage, self._call("GET", "/v1/runs", query=query))
            yield from page.runs
            if page.next_cursor is None:
                return
            query["cursor"] = page.next_cursor

    def trajectory(self, run_id: str) -> Trajectory:
        return read(Trajectory, self._call("GET", f"/v1/runs/{segment(run_id)}/trajectory"))

    def cancel(self, run_id: str) -> RunView:
        return read(RunView, self._call("POST", f"/v1/runs/{segment(run_id)}/cancel"))

    def feedback(
        self,
        run_id: str,
        *,
        rating: str | None = None,
        outcome: str | None = None,
        correction: Mapping[str, Json] | None = None,
        comment: str | None = None,
    ) -> FeedbackTaken:
        """Judge a finished run; a correction is the right answer, whole."""
        given = {
            "rating": rating,
            "outcome": outcome,
            "correction": None if correction is None else dict(correction),
            "comment": comment,
        }
        said = {name: value for name, value in given.items() if value is not None}
        body = checked(GiveFeedback, said)
        path = f"/v1/runs/{segment(run_id)}/feedback"
        return read(FeedbackTaken, self._call("POST", path, body=body))

    # ------------------------------------------------------------ events

    def events(self, run_id: str, after: int = 0) -> Iterator[EventView]:
        """Every event after `after` as it happens, until the run is over, none twice or missed."""
        failures, over = 0, False
        while not over:
            before = after
            try:
                with self._stream(run_id, after) as answer:
                    over = answer.status_code == HTTPStatus.NO_CONTENT
                    for event in _parse_events(answer):
                        yield event
                        after = event.seq
                        over = over or isinstance(event.body, Finished)
            except httpx.TransportError as error:
                failures = 1 if after > before else failures + 1
                if failures > self._retries:
                    raise ApiUnreachable(str(self._http.base_url), error) from error
            if not over:  # cut, or ended by a server that is shutting down
                self._pause(_backoff(failures))

    @contextmanager
    def _stream(self, run_id: str, after: int) -> Generator[httpx.Response]:
        request = self._http.build_request(
            "GET",
            f"/v1/runs/{segment(run_id)}/events",
            headers={"Accept": "text/event-stream", "Last-Event-ID": str(after)},
            timeout=httpx.Timeout(self._timeout, read=max(self._timeout, STREAM_SILENCE)),
        )
        answer = self._send(request, stream=True, repeatable=True)
        try:
            yield answer
        finally:
            answer.close()

    # ------------------------------------------------------------ domains, keys, readiness

    def domains(self) -> list[DomainSummary]:
        return read(DomainList, self._call("GET", "/v1/domains")).domains

    def domain(self, name: str) -> DomainView:
        return read(DomainView, self._call("GET", f"/v1/domains/{segment(name)}"))

    def create_key(
        self,
        name: str,
        scopes: Sequence[Scope | str],
        *,
        expires_at: datetime | None = None,
    ) -> KeyCreated:
        """A new key; its secret is in this answer and nowhere else."""
        values = {"name": name, "scopes": list(scopes), "expires_at": expires_at}
        body = checked(CreateKey, values)
        return read(KeyCreated, self._call("POST", "/v1/keys", body=body))

    def list_keys(self) -> list[KeyView]:
        return read(KeyList, self._call("GET", "/v1/keys")).keys

    def revoke_key(self, key_id: str) -> None:
        self._call("DELETE", f"/v1/keys/{segment(key_id)}")

    def ready(self) -> bool:
        """Whether the API can take work now; asks once, without retries."""
        try:
            return self._http.get("/readyz").status_code == HTTPStatus.OK
        except httpx.TransportError:
            return False

    # ------------------------------------------------------------ sending

    def _call(
        self,
        method: str,
        path: str,
        *,
        body: BaseModel | None = None,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        repeatable: bool = False,
    ) -> httpx.Response:
        request = self._http.build_request(
            method,
            path,
            json=None if body is None else body.model_dump(mode="json", exclude_unset=True),
            params=query,
            headers=headers,
            timeout=self._timeout if timeout is None else timeout,
        )
        return self._send(request, repeatable=repeatable or method in ("GET", "DELETE"))

    def _send(
        self, request: httpx.Request, *, repeatable: bool, stream: bool = False
    ) -> httpx.Response:
        """The answer; `repeatable` says whether asking again is safe once it may have arrived."""
        for attempt in range(self._retries + 1):
            last = attempt == self._retries
            try:
                answer = self._http.send(request, stream=stream)
            except httpx.TransportError as error:
                safe = repeatable or isinstance(error, _NEVER_SENT)
                if last or not safe:
                    raise ApiUnreachable(str(self._http.base_url), error) from error
                self._pause(_backoff(attempt))
                continue
            if answer.is_success:
                return answer
            answer.read()
            if last or answer.status_code not in _WORTH_RETRYING:
                raise _problem(answer)
            self._pause(_retry_after(answer) or _backoff(attempt))
        raise AssertionError("the last attempt returns or raises")


def _backoff(attempt: int) -> float:
    """Seconds before trying again: doubling, capped, jittered so that clients spread out."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt) * random.uniform(0.5, 1.0)


def _retry_after(answer: httpx.Response) -> float | None:
    value = answer.headers.get("retry-after", "")
    return min(float(value), LONGEST_PAUSE) if value.isdecimal() else None


def segment(name: str) -> str:
    """One segment of a path, whatever the name holds: dots and slashes lead nowhere else."""
    whole = name.replace("/", "%2F")  # quoted twice: servers decode once before they route
    return quote(whole, safe="", errors="replace").replace(".", "%2E")


def checked(model: type[_View], values: Mapping[str, Any]) -> _View:
    """A request body, refused here with the words the server would use."""
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        wrong = _wrong(error)
        detail = "; ".join(f"{each.field}: {each.message}" for each in wrong)
        raise ApiProblem(422, "Unprocessable Content", detail, wrong) from error


def _wrong(error: ValidationError) -> list[FieldProblem]:
    return [
        FieldProblem(field=".".join(map(str, each["loc"])) or "body", message=each["msg"])
        for each in error.errors(include_url=False)
    ]


def read(model: type[_View], answer: httpx.Response) -> _View:
    return _parsed(model, answer.content, answer)


def _parsed(model: type[_View], content: str | bytes, answer: httpx.Response) -> _View:
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        wrong = _wrong(error)
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        detail = (
            f"{answer.url} did not answer as this client's version expects: "
            f"{wrong[0].field}: {wrong[0].message}{more}"
        )
        raise ApiProblem(answer.status_code, "Unexpected answer", detail, wrong) from error


def _problem(answer: httpx.Response) -> ApiProblem:
    """What the answer says went wrong, also where a proxy said it and not the API."""
    try:
        told = Problem.model_validate_json(answer.content)
    except ValidationError:
        detail = answer.text[:300].strip() or f"{answer.url} answered without an explanation"
        return ApiProblem(answer.status_code, answer.reason_phrase or "Error", detail)
    return ApiProblem(told.status, told.title, told.detail, told.errors)


def _parse_events(answer: httpx.Response) -> Iterator[EventView]:
    """Events of a server-sent stream; comments and fields the client does not need are skipped."""
    data: list[str] = []
    for line in answer.iter_lines():
        if line.startswith("data:"):
            data.append(line[len("data:") :].removeprefix(" "))
        elif not line and data:
            yield _parsed(EventView, "\n".join(data), answer)
            data.clear()
