"""The first 100 real customer messages of banking77 through the API: a verdict each, none lost."""

import csv
from pathlib import Path

import pytest

from runtime.client import NoriaClient

COUNT = 100


def first_messages(path: Path, count: int) -> list[str]:
    with path.open(newline="", encoding="utf-8") as file:
        return [row["text"] for _, row in zip(range(count), csv.DictReader(file), strict=False)]


@pytest.mark.model
@pytest.mark.timeout(900)
def test_real_messages_get_a_verdict_each(real_data: Path, client: NoriaClient) -> None:
    messages = first_messages(real_data / "banking77" / "test.csv", COUNT)
    admitted = [client.create_run("support_triage", {"message": text}) for text in messages]
    assert len({run.id for run in admitted}) == COUNT
    for run in admitted:
        last = [event.type for event in client.events(run.id)][-1]
        assert last == "finished"
        finished = client.run(run.id)
        assert finished.verdict is not None, (finished.state, finished.reason)
        trajectory = client.trajectory(run.id)
        assert [event.seq for event in trajectory.events] == list(
            range(1, len(trajectory.events) + 1)
        )
        calls = trajectory.model_calls
        assert calls, "a run that was judged has sampled something"
        assert all(len(call.sampled) == len(call.logprobs) > 0 for call in calls)
