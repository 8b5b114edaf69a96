"""Bodies of very many values: refused cheaply, and never at the cost of who else is calling."""

import json
import threading
import time
from collections.abc import Callable
from typing import Annotated

import pytest
from pydantic import AfterValidator, BaseModel, TypeAdapter, ValidationError

from runtime.api.body import MAX_VALUES, OFF_THE_LOOP_BYTES, StrictRoute, parse_json
from runtime.api.uploads import Files
from tests.fixtures.api import LETTER, Api, problem

JSON = {"Content-Type": "application/json"}
MANY = 200_000
CROWDED: dict[str, bytes] = {
    "files": json.dumps({**LETTER, "files": {f"f{n}": "" for n in range(60_000)}}).encode(),
    "input": json.dumps({**LETTER, "input": {f"k{n}": 1 for n in range(60_000)}}).encode(),
    "options": json.dumps({f"k{n}": 1 for n in range(60_000)}).encode(),
    "a list": json.dumps({**LETTER, "input": {"message": [0] * MANY}}).encode(),
}


async def test_a_crowded_body_is_refused_on_every_route(api: Api) -> None:
    async with api.client() as http:
        run_id = (await http.post("/v1/runs", json=LETTER)).json()["id"]
        for name, body in CROWDED.items():
            for url in ("/v1/runs", "/v1/keys", f"/v1/runs/{run_id}/feedback"):
                told = problem(await http.post(url, content=body, headers=JSON), 400)
                assert f"more than {MAX_VALUES} values" in told["detail"], name
        assert len((await http.get("/v1/runs")).json()["runs"]) == 1


def test_files_are_counted_before_any_of_them_is_looked_at() -> None:
    files = {f"../{n}": "%" for n in range(MANY)}
    with pytest.raises(ValidationError) as refused:
        TypeAdapter(Files).validate_python(files)
    assert [each["msg"] for each in refused.value.errors()] == [
        f"Value error, {MANY} files; at most 64"
    ]


def refuse(body: bytes) -> None:
    with pytest.raises(ValueError, match="more than"):
        parse_json(body)


def test_what_a_refusal_costs_does_not_grow_with_the_body() -> None:
    few, many = ([b"{}", b',{"a": ","}' * n] for n in (MAX_VALUES, 20 * MAX_VALUES))
    bodies = [b"[%b]" % b"".join(parts) for parts in (few, many)]
    once, twenty_times = (cpu_seconds(refuse, body) for body in bodies)
    assert twenty_times < 3 * once


def test_texts_without_an_end_cost_linear_time() -> None:
    def fail(body: bytes) -> None:
        with pytest.raises(ValueError, match="not JSON"):
            parse_json(body)

    once, ten_times = (cpu_seconds(fail, b'["' + b'\\"' * n) for n in (50_000, 500_000))
    assert ten_times < 30 * once


def cpu_seconds(act: Callable[[bytes], object], body: bytes) -> float:
    """The least of a few tries: what it costs without what else the machine does."""
    tries: list[float] = []
    for _ in range(5):
        started = time.thread_time()
        act(body)
        tries.append(time.thread_time() - started)
    return min(tries)


def test_the_values_limit_is_exact_and_texts_do_not_count() -> None:
    fits = [0] * (MAX_VALUES - 2)
    parse_json(json.dumps([*fits, ',[{\\"' * MAX_VALUES]).encode())
    with pytest.raises(ValueError, match=f"more than {MAX_VALUES} values"):
        parse_json(json.dumps([*fits, 0, 0]).encode())


@pytest.mark.parametrize("size", [10, OFF_THE_LOOP_BYTES])
async def test_only_a_large_body_is_validated_off_the_loop(api: Api, size: int) -> None:
    threads: list[int] = []

    def noted(text: str) -> str:
        threads.append(threading.get_ident())
        return text

    class Body(BaseModel):
        text: Annotated[str, AfterValidator(noted)]
        number: int = 0

    async def handle(body: Body) -> int:
        return len(body.text)

    api.app.router.add_api_route(
        "/noted", handle, methods=["POST"], route_class_override=StrictRoute
    )
    async with api.client() as http:
        assert (await http.post("/noted", json={"text": "x" * size})).json() == size
        told = problem(await http.post("/noted", json={"text": "x" * size, "number": "?"}), 422)
    assert len(threads) == 2, "once for each body"
    on_the_loop = {thread == threading.get_ident() for thread in threads}
    assert on_the_loop == {size < OFF_THE_LOOP_BYTES}
    assert told["errors"][0]["field"] == "number", "named alike either way"
