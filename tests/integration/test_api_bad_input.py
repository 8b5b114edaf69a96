"""What callers must not send: refused with a problem that says what and where, never a 500."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.api.body import MAX_DEPTH, parse_json
from tests.fixtures.api import DEFAULT, Api, LiveApi

LETTER: dict[str, Any] = {"domain": "letters", "input": {"message": "hi"}}
JSON = {"Content-Type": "application/json"}


def wrapped(inner: str) -> bytes:
    """A create request whose message is the given JSON text."""
    return b'{"domain": "letters", "input": {"message": %b}}' % inner.encode()


MALFORMED: dict[str, tuple[bytes, str]] = {
    "no JSON": (b"{", "line 1, column 2"),
    "two values": (b"{} {}", "not JSON"),
    "trailing comma": (b'{"domain": "letters",}', "not JSON"),
    "a byte order mark": (b"\xef\xbb\xbf{}", "not JSON"),
    "NaN": (wrapped("NaN"), "NaN is not a JSON number"),
    "Infinity": (wrapped("-Infinity"), "-Infinity is not a JSON number"),
    "1e400": (wrapped("1e400"), "1e400 is out of range"),
    "5,000 digits": (wrapped("9" * 5000), "out of range"),
    "a repeated key": (b'{"domain": "letters", "domain": "x", "input": {}}', "'domain' is written"),
    "a repeated key inside": (wrapped('{"a": 1, "a": 2}'), "'a' is written twice"),
    "invalid UTF-8": (b'{"domain": "\xff"}', "byte 12 is not UTF-8"),
    "UTF-16": ('{"domain": "letters"}'.encode("utf-16"), "not UTF-8"),
    "an escaped NUL": (wrapped(r'"a\u0000b"'), "NUL"),
    "an escaped NUL in a key": (wrapped(r'{"a\u0000b": 1}'), "NUL"),
    "a raw NUL": (wrapped('"a\0b"'), "control character"),
    "half a surrogate pair": (wrapped(r'"\ud800"'), "surrogate"),
    "10,000 arrays": (wrapped("[" * 10_000 + "]" * 10_000), "nested deeper"),
    "10,000 objects": (wrapped('{"a":' * 10_000 + "1" + "}" * 10_000), "nested deeper"),
    "a hundred arrays": (wrapped("[" * 100 + "]" * 100), "nested deeper"),
    "open arrays": (b"[" * 100_000, ""),
}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no domain": ({"input": {}}, "domain"),
    "no input": ({"domain": "letters"}, "input"),
    "an unknown domain": ({**LETTER, "domain": "nothing"}, "domain"),
    "a domain that is a path": ({**LETTER, "domain": "../letters"}, "domain"),
    "an input that is a list": ({**LETTER, "input": []}, "input"),
    "a missing field": ({**LETTER, "input": {}}, "input.message"),
    "a field of the wrong type": ({**LETTER, "input": {"message": 7}}, "input.message"),
    "a field too long": ({**LETTER, "input": {"message": "x" * 1001}}, "input.message"),
    "an unknown field": ({**LETTER, "input": {"message": "x", "more": 1}}, "input"),
    "an unknown option": ({**LETTER, "wiat": True}, "wiat"),
    "an unknown kind": ({**LETTER, "kind": "test"}, "kind"),
    "an unknown mode": ({**LETTER, "mode": "later"}, "mode"),
    "an unknown level": ({**LETTER, "level": "hard"}, "level"),
    "a temperature too high": ({**LETTER, "sampling": {"temperature": 3}}, "sampling.temperature"),
    "a seed too large": ({**LETTER, "sampling": {"seed": 2**64}}, "sampling.seed"),
    "a negative wait": ({**LETTER, "wait_seconds": -1}, "wait_seconds"),
    "no base64": ({**LETTER, "files": {"a": "%%%"}}, "files.a"),
    "too many files": ({**LETTER, "files": {f"f{n}": "" for n in range(65)}}, "files"),
    "a file as folder": ({**LETTER, "files": {"a": "", "a/b": ""}}, "files"),
    "9,000 files": ({**LETTER, "files": {f"f{n}/../x": "%" for n in range(9_000)}}, "files"),
    "a connector the domain lacks": ({**LETTER, "connectors": {"crm": {}}}, "connectors.crm"),
    "an empty expectation": ({**LETTER, "expectation": {}}, "expectation"),
    "an expectation that is a list": ({**LETTER, "expectation": []}, "expectation"),
    "an expectation of another shape": ({**LETTER, "expectation": {"tone": "kind"}}, "expectation"),
    "an expectation that cannot be": (
        {**LETTER, "expectation": {"queue": "gold"}},
        "expectation.queue",
    ),
    "files too large": ({**LETTER, "files": {"a": "AAAA" * 400_000}}, "files"),
}
PATHS = (
    "",
    ".",
    "..",
    "/etc/passwd",
    "../up",
    "a/../../up",
    "a//b",
    "a/",
    "./a",
    "a/./b",
    "..\\up",
    "C:\\x",
    "a\nb",
    "a\x7fb",
    "a\u202eb",
    "x" * 256,
    "d/" * 16 + "f",
    "/".join(["x" * 200] * 6),
)


def problem(answer: httpx.Response, *statuses: int) -> dict[str, Any]:
    assert answer.status_code in statuses, (answer.status_code, answer.text[:300])
    assert answer.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = answer.json()
    assert body["status"] == answer.status_code
    assert len(answer.content) < 32 << 10, "an error is not an echo"
    return body


async def count_runs(api: Api) -> int:
    async with api.database.transaction() as connection:
        cursor = await connection.execute(
            "SELECT count(*) AS n FROM runtime.runs WHERE tenant_id = %s", (DEFAULT,)
        )
        row = await cursor.fetchone()
    assert row is not None
    return row["n"]


async def test_malformed_bodies_are_refused_on_every_route(api: Api) -> None:
    async with api.client() as http:
        run_id = (await http.post("/v1/runs", json=LETTER)).json()["id"]
        for name, (body, said) in MALFORMED.items():
            for url in ("/v1/runs", "/v1/keys", f"/v1/runs/{run_id}/feedback"):
                told = problem(await http.post(url, content=body, headers=JSON), 400)
                assert said in told["detail"], name
    assert await count_runs(api) == 1


async def test_wrong_fields_are_named(api: Api) -> None:
    async with api.client() as http:
        for name, (body, field) in WRONG.items():
            told = problem(await http.post("/v1/runs", json=body), 422)
            fields = [each["field"] for each in told["errors"]]
            assert any(each.startswith(field) for each in fields), (name, fields)
    assert await count_runs(api) == 0


async def test_an_expectation_may_be_partial(api: Api) -> None:
    async with api.client() as http:
        answer = await http.post("/v1/runs", json={**LETTER, "expectation": {"queue": "cards"}})
    assert answer.status_code == 202, answer.text


async def test_every_wrong_field_is_named_at_once(api: Api) -> None:
    async with api.client() as http:
        body = {"domain": "letters", "input": {"message": 7, "customer_id": 8}}
        told = problem(await http.post("/v1/runs", json=body), 422)
    assert {each["field"] for each in told["errors"]} == {"input.message", "input.customer_id"}


async def test_paths_that_leave_the_workspace_are_refused(api: Api) -> None:
    async with api.client() as http:
        for path in PATHS:
            body = {**LETTER, "files": {path: ""}}
            told = problem(await http.post("/v1/runs", json=body), 422)
            assert told["errors"][0]["field"].startswith("files"), path
    assert await count_runs(api) == 0


async def test_only_json_is_taken(api: Api) -> None:
    content = json.dumps(LETTER).encode()
    async with api.client() as http:
        for media_type in ("text/plain", "application/x-www-form-urlencoded", "application/xml"):
            headers = {"Content-Type": media_type}
            told = problem(await http.post("/v1/runs", content=content, headers=headers), 415)
            assert "application/json" in told["detail"]
        problem(await http.post("/v1/runs", content=content), 415)
        problem(await http.post("/v1/runs", headers=JSON), 422)
        with_charset = {"Content-Type": "Application/JSON; charset=utf-8"}
        answer = await http.post("/v1/runs", content=content, headers=with_charset)
        assert answer.status_code == 202


async def test_other_json_values_are_no_request(api: Api) -> None:
    async with api.client() as http:
        for body in (b"[]", b"null", b"7", b'"text"', b"true", b"[{}]"):
            problem(await http.post("/v1/runs", content=body, headers=JSON), 422)


async def test_bad_headers_and_queries_are_refused(api: Api) -> None:
    async with api.client() as http:
        for key in ("", " ", "a b", "k" * 256):
            headers = {"Idempotency-Key": key}
            told = problem(await http.post("/v1/runs", json=LETTER, headers=headers), 400)
            assert told["errors"][0]["field"] == "Idempotency-Key"
        for query in (
            "limit=0",
            "limit=201",
            "limit=1e400",
            "limit=NaN",
            "state=done",
            "kind=x",
            "domain=%00",
            "domain=..%2F",
            "cursor=x",
            "cursor=%00",
            "cursor=MjAyNi0wMS0wMSBydW5fMA==",
            "cursor=" + "A" * 300,
        ):
            told = problem(await http.get(f"/v1/runs?{query}"), 422)
            assert told["errors"][0]["field"] == query.split("=")[0]
    assert await count_runs(api) == 0


async def test_bad_keys_are_refused(api: Api) -> None:
    async with api.client() as http:
        for body in (
            {"name": "x", "scopes": []},
            {"name": "x", "scopes": ["root"]},
            {"name": "", "scopes": ["admin"]},
            {"name": "a\nb", "scopes": ["admin"]},
            {"name": "x", "scopes": ["admin"], "expires_at": "2001-01-01T00:00:00Z"},
            {"name": "x", "scopes": ["admin"], "expires_at": "2101-01-01T00:00:00"},
            {"name": "x", "scopes": ["admin"], "tenant_id": "other"},
        ):
            problem(await http.post("/v1/keys", json=body), 422)


async def test_a_large_body_is_refused_before_it_is_read(api: Api) -> None:
    limit = api.services.max_body_bytes
    sent = 0

    async def endless(chunks: int) -> Any:
        nonlocal sent
        for _ in range(chunks):
            sent += 64 << 10
            yield b" " * (64 << 10)

    async with api.client() as http:
        declared = {**JSON, "Content-Length": str(50 << 20)}
        answer = await http.post("/v1/runs", content=endless(800), headers=declared)
        assert str(limit) in problem(answer, 413)["detail"]
        sent = 0
        problem(await http.post("/v1/runs", content=endless(800), headers=JSON), 413)
        exactly = json.dumps({**LETTER, "wiat": ""}).encode()
        exactly = exactly[:-2] + b"x" * (limit - len(exactly)) + exactly[-2:]
        assert len(exactly) == limit
        problem(await http.post("/v1/runs", content=exactly, headers=JSON), 422)


def test_fifty_megabytes_over_a_socket_are_refused_early(live_api: LiveApi) -> None:
    """The server answers and closes; it never takes the 50 MB in."""

    async def post() -> tuple[bytes, int]:
        host, _, port = live_api.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = (
            f"POST /v1/runs HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {live_api.key}\r\n"
            "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        writer.write(head.encode())
        chunk = b"%x\r\n%b\r\n" % (64 << 10, b" " * (64 << 10))
        sent = 0
        answer = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
        try:
            while sent < 50 << 20 and not answer.done():
                writer.write(chunk)
                await writer.drain()
                sent += 64 << 10
                await asyncio.sleep(0)
        except ConnectionError:
            pass
        head_of_answer = await answer
        writer.close()
        return head_of_answer, sent

    answer, sent = asyncio.run(post())
    assert b" 413 " in answer.splitlines()[0]
    assert b"application/problem+json" in answer
    assert sent < 20 << 20
    with httpx.Client(base_url=live_api.url) as http:
        assert http.get("/healthz").status_code == 200


# ---------------------------------------------------------------- the parser by itself

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8", exclude_characters="\0")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abc"), inner, max_size=4),
    max_leaves=20,
)


@given(json_values, st.booleans())
def test_what_json_can_say_comes_through(value: Any, ascii_only: bool) -> None:
    assert parse_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@given(st.binary(max_size=60) | st.text('[]{}",:\\u0dN1e-', max_size=60).map(str.encode))
def test_no_bytes_break_the_parser(body: bytes) -> None:
    try:
        value = parse_json(body)
    except ValueError:
        return
    json.dumps(value, allow_nan=False).encode()


@pytest.mark.parametrize("depth", [MAX_DEPTH, MAX_DEPTH + 1])
def test_the_depth_limit_is_exact(depth: int) -> None:
    body = b"[" * depth + b"]" * depth
    if depth <= MAX_DEPTH:
        parse_json(body)
    else:
        with pytest.raises(ValueError, match="nested deeper than 64 levels"):
            parse_json(body)
