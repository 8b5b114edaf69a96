"""The typed client against the API behind a real socket: retries, events, dropped readers."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import psycopg
import pytest

from runtime.client import ApiProblem, ApiUnreachable, NoriaClient
from runtime.run import RunId, RunState, Thought
from tests.fixtures.api import LiveApi, claim, finish, record

MESSAGE = {"message": "my card was stolen"}


@pytest.fixture
def client(live_api: LiveApi) -> Iterator[NoriaClient]:
    with NoriaClient(live_api.url, live_api.key) as opened:
        yield opened


def thought(step: int) -> Thought:
    return Thought(
        step=step, turn=step, text=f"step {step}", calls=[], sampled_tokens=2, prompt_tokens=3
    )


def play(live: LiveApi, run_id: str, steps: int, state: RunState = RunState.ACCEPTED) -> None:
    """Do a runner's part: some steps, then the end."""

    async def played() -> None:
        lease = await claim(live.services.database, RunId(run_id))
        for step in range(steps):
            await record(live.services.database, lease, thought(step))
        await finish(live.services.database, lease, state)

    live.do(played())


class Flaky(httpx.BaseTransport):
    """A real connection that fails as told: by status, or by cutting off the answer."""

    def __init__(self, *failures: int | httpx.TransportError) -> None:
        self._real = httpx.HTTPTransport()
        self._failures = list(failures)
        self.requests: list[httpx.Request] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        failure = self._failures.pop(0) if self._failures else None
        if isinstance(failure, int):
            return httpx.Response(failure, headers={"Retry-After": "3"}, request=request)
        answer = self._real.handle_request(request)
        if failure is not None:
            answer.read()
            raise failure
        return answer

    def close(self) -> None:
        self._real.close()


# ---------------------------------------------------------------- the whole surface


def test_a_run_from_creation_to_feedback(live_api: LiveApi, client: NoriaClient) -> None:
    assert client.ready()
    assert [domain.name for domain in client.domains()] == ["letters"]
    assert client.domain("letters").output_schema["required"] == ["queue", "priority"]
    run = client.create_run("letters", MESSAGE, files={"a.bin": b"\x00\xff"}, sampling={"seed": 3})
    assert run.state is RunState.QUEUED
    assert run.sampling.seed == 3
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(lambda: list(client.events(run.id)))
        play(live_api, run.id, steps=3)
        events = following.result(20)
    assert [event.seq for event in events] == [1, 2, 3, 4, 5]
    assert [event.type for event in events] == ["admitted", *["thought"] * 3, "finished"]
    assert client.run(run.id).state is RunState.ACCEPTED
    taken = client.feedback(run.id, rating="down", correction={"queue": "fraud", "priority": 1})
    assert taken.seq == 6
    assert [event.seq for event in client.events(run.id, after=4)] == [5, 6]
    assert list(client.events(run.id, after=6)) == []
    assert client.trajectory(run.id).run == client.run(run.id)
    assert [each.id for each in client.runs(domain="letters")] == [run.id]


def test_pages_are_fetched_as_needed(client: NoriaClient) -> None:
    made = [client.create_run("letters", MESSAGE).id for _ in range(5)]
    assert [run.id for run in client.runs(page_size=2)] == made[::-1]


def test_waiting_comes_back_with_the_end(live_api: LiveApi, client: NoriaClient) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(
            lambda: client.create_run("letters", MESSAGE, wait=True, wait_seconds=20)
        )
        while not (runs := list(client.runs())):
            pass
        play(live_api, runs[0].id, steps=0, state=RunState.REJECTED)
        assert waiting.result(20).state is RunState.REJECTED


def test_cancel_and_keys(client: NoriaClient, live_api: LiveApi) -> None:
    run = client.create_run("letters", MESSAGE)
    assert client.cancel(run.id).state is RunState.CANCELLED
    with pytest.raises(ApiProblem, match="already ended"):
        client.cancel(run.id)
    expires = datetime.now(UTC) + timedelta(hours=1)
    made = client.create_key("crm", ["runs:read"], expires_at=expires)
    assert {key.id for key in client.list_keys()} >= {made.id}
    with NoriaClient(live_api.url, made.key) as crm:
        assert crm.run(run.id).id == run.id
        with pytest.raises(ApiProblem, match="needs the scope runs:write") as refused:
            crm.create_run("letters", MESSAGE)
        assert refused.value.status == 403
    client.revoke_key(made.id)
    with NoriaClient(live_api.url, made.key) as crm, pytest.raises(ApiProblem, match="revoked"):
        crm.run(run.id)


def test_problems_are_readable_and_name_the_field(client: NoriaClient) -> None:
    with pytest.raises(ApiProblem) as refused:
        client.create_run("letters", {"message": 7})
    assert refused.value.status == 422
    assert [each.field for each in refused.value.errors] == ["input.message"]
    assert "input" in str(refused.value)
    with pytest.raises(ApiProblem, match="wiat"):
        client.create_run("letters", MESSAGE, wiat=1)
    with pytest.raises(ApiProblem, match="relative path"):
        client.create_run("letters", MESSAGE, files={"../up": b""})


class Stranger(httpx.BaseTransport):
    """Whatever answers at the address, it is no Noria of this version."""

    def __init__(self, content: str) -> None:
        self._content = content

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, text=self._content, request=request)


@pytest.mark.parametrize("content", ["<html>", "{}", "[]", 'data: {"seq": "x"}\n\n'])
def test_an_answer_of_another_shape_is_one_sentence(content: str) -> None:
    with NoriaClient("http://stranger", "key", transport=Stranger(content)) as client:
        for ask in (client.run, client.trajectory, client.domain):
            with pytest.raises(ApiProblem, match=r"stranger/v1/.* did not answer as") as refused:
                ask("x")
            assert "\n" not in str(refused.value)
    with NoriaClient("http://stranger", "key", transport=Stranger("data: {}\n\n")) as client:
        with pytest.raises(
            ApiProblem, match=r"/events did not answer as .* and [0-9] more"
        ) as told:
            next(client.events("x"))
        assert "\n" not in str(told.value)


# ---------------------------------------------------------------- retries


def test_a_lost_answer_is_asked_for_again_and_makes_one_run(live_api: LiveApi) -> None:
    pauses: list[float] = []
    flaky = Flaky(503, httpx.ReadError("cut"), httpx.RemoteProtocolError("cut"), 429)
    with NoriaClient(live_api.url, live_api.key, transport=flaky, pause=pauses.append) as client:
        run = client.create_run("letters", MESSAGE)
        assert [each.id for each in client.runs()] == [run.id]
    creating = [request for request in flaky.requests if request.method == "POST"]
    assert len(creating) == 5
    assert len({request.headers["Idempotency-Key"] for request in creating}) == 1
    assert pauses[0] == pauses[3] == 3.0, "Retry-After is respected"
    assert 0 < pauses[1] < pauses[2] * 2 <= 1.6


def test_what_is_not_safe_to_repeat_is_not_repeated(live_api: LiveApi) -> None:
    flaky = Flaky(httpx.ReadError("cut"))
    with (
        NoriaClient(live_api.url, live_api.key, transport=flaky, pause=no_pause) as client,
        pytest.raises(ApiUnreachable, match="no answer from"),
    ):
        client.create_key("crm", ["runs:read"])
    assert len(flaky.requests) == 1


def no_pause(seconds: float) -> None:
    assert seconds >= 0


def test_an_api_that_is_not_there_is_named_after_retries() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    pauses: list[float] = []
    with NoriaClient(url, "key", retries=2, pause=pauses.append) as client:
        assert not client.ready()
        with pytest.raises(ApiUnreachable, match=url) as error:
            client.run("run_x")
    assert error.value.status == 0
    assert len(pauses) == 2


# ---------------------------------------------------------------- events over a cut line


class CutLine(httpx.BaseTransport):
    """A real connection whose event streams break after so many bytes."""

    def __init__(self, bytes_each: int) -> None:
        self._real = httpx.HTTPTransport()
        self._bytes_each = bytes_each
        self.last_ids: list[str] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = self._real.handle_request(request)
        if request.url.path.endswith("/events"):
            self.last_ids.append(request.headers["Last-Event-ID"])
            answer.stream = _Cut(answer.stream, self._bytes_each)
        return answer

    def close(self) -> None:
        self._real.close()


class _Cut(httpx.SyncByteStream):
    def __init__(self, stream: Any, size: int) -> None:
        self._stream = stream
        self._left = size

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._stream:
            yield chunk[: self._left]
            self._left -= len(chunk)
            if self._left <= 0:
                raise httpx.ReadError("cut")

    def close(self) -> None:
        self._stream.close()


def test_events_survive_a_line_that_keeps_breaking(live_api: LiveApi) -> None:
    line = CutLine(bytes_each=2_000)
    with NoriaClient(live_api.url, live_api.key, transport=line, pause=no_pause) as client:
        run = client.create_run("letters", MESSAGE)
        play(live_api, run.id, steps=40)
        seen = [event.seq for event in client.events(run.id)]
    assert seen == list(range(1, 43)), "none missed, none twice"
    assert len(line.last_ids) > 3
    assert line.last_ids == sorted(line.last_ids, key=int)


def test_a_line_that_never_delivers_ends_in_words(live_api: LiveApi) -> None:
    line = CutLine(bytes_each=1)
    with NoriaClient(live_api.url, live_api.key, retries=3, transport=line, pause=no_pause) as c:
        run = c.create_run("letters", MESSAGE)
        with pytest.raises(ApiUnreachable, match="cut"):
            list(c.events(run.id))
    assert len(line.last_ids) == 4


# ---------------------------------------------------------------- readers that leave


def test_a_reader_that_leaves_frees_everything(live_api: LiveApi, client: NoriaClient) -> None:
    run = client.create_run("letters", MESSAGE)
    for _ in range(3):
        with open_stream(live_api, run.id, live_api.key) as lines:
            assert "event: admitted" in lines
            assert live_api.doorbell.ears, "the server follows the run for this reader"
    live_api.do(asyncio.wait_for(live_api.doorbell.deserted.wait(), 10))
    with psycopg.connect(live_api.database_url) as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE state = 'idle in transaction' AND datname = current_database()"
        ).fetchone()
    assert row == (0,)


@contextmanager
def open_stream(live: LiveApi, run_id: str, key: str) -> Iterator[Iterator[str]]:
    """The lines of an event stream as they come."""
    headers = {"Authorization": f"Bearer {key}"}
    with (
        httpx.Client(base_url=live.url, headers=headers, timeout=10) as http,
        http.stream("GET", f"/v1/runs/{run_id}/events") as answer,
    ):
        yield answer.iter_lines()


def test_revoking_a_key_ends_its_open_streams(live_api: LiveApi, client: NoriaClient) -> None:
    run = client.create_run("letters", MESSAGE)
    made = client.create_key("reader", ["runs:read"])
    with open_stream(live_api, run.id, made.key) as lines:
        assert "event: admitted" in lines
        client.revoke_key(made.id)
        revoked_at = time.monotonic()
        assert "event: admitted" not in lines, "the stream ends, with nothing more"
        assert time.monotonic() - revoked_at < 3


def test_idle_streams_hold_no_connection_and_are_kept_alive(
    live_api: LiveApi, client: NoriaClient
) -> None:
    """Twenty streams over a pool of eight: all get heartbeats, and others are still served."""
    run = client.create_run("letters", MESSAGE)
    beating = threading.Barrier(21, timeout=20)

    def follow() -> list[str]:
        seen: list[str] = []
        with open_stream(live_api, run.id, live_api.key) as lines:
            for line in lines:
                if line == ": still here" and line not in seen:
                    seen.append(line)
                    beating.wait()
                if line.startswith("event: "):
                    seen.append(line)
        return seen

    with ThreadPoolExecutor(20) as pool:
        streams = [pool.submit(follow) for _ in range(20)]
        beating.wait()
        assert client.run(run.id).state is RunState.QUEUED
        play(live_api, run.id, steps=1)
        for stream in streams:
            assert stream.result(20) == [
                "event: admitted",
                ": still here",
                "event: thought",
                "event: finished",
            ]


def test_a_lost_doorbell_costs_a_second_and_no_event(
    live_api: LiveApi, client: NoriaClient
) -> None:
    run = client.create_run("letters", MESSAGE)
    with psycopg.connect(live_api.database_url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE query LIKE 'LISTEN%' AND datname = current_database()"
        )
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(lambda: [event.seq for event in client.events(run.id)])
        play(live_api, run.id, steps=2)
        assert following.result(20) == [1, 2, 3, 4]


def test_a_server_that_stops_ends_its_streams(live_api: LiveApi, client: NoriaClient) -> None:
    run = client.create_run("letters", MESSAGE)
    with open_stream(live_api, run.id, live_api.key) as lines:
        assert "event: admitted" in lines
        live_api.loop.call_soon_threadsafe(live_api.services.draining.set)
        assert "event: finished" not in lines, "the stream ends, without an error"
    ready = httpx.get(f"{live_api.url}/readyz")
    assert ready.status_code == 503
    assert "shutting down" in ready.json()["detail"]


def test_the_client_does_not_load_the_server() -> None:
    """In a fresh interpreter: the UI and the CLI start without FastAPI or a database driver."""
    import subprocess
    import sys

    script = (
        "import sys, runtime.client; "
        "print([m for m in ('fastapi', 'starlette', 'psycopg', 'torch') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
