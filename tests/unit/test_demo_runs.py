"""Runs of a demo: each wish to its end under its own key; faults are asked for anew."""

import pytest

from deploy.demo.runs import Ran, Wish, play, sampling_seed
from deploy.home import CannotRun
from runtime.client import ApiProblem
from runtime.run import RunKind
from tests.fixtures.demo_runs import RunsApi, task_of


def wishes(count: int) -> list[Wish]:
    return [Wish("practice", task_of(f"t{n}")) for n in range(count)]


def nothing(ran: Ran) -> None:
    del ran


def test_every_wish_ends_in_its_order_and_is_told_of() -> None:
    api = RunsApi(lambda key, before: "rejected" if "t3" in key else "accepted")
    told: list[str] = []
    with api.client() as client:
        ran = play(client, "d1", wishes(40), lambda each: told.append(each.wish.task.id))
    assert [each.wish.task.id for each in ran] == [f"t{n}" for n in range(40)]
    assert {each.wish.task.id for each in ran if not each.passed} == {
        task for task in told if task.startswith("t3")
    }
    assert sorted(told) == sorted(f"t{n}" for n in range(40))


def test_the_same_demo_asks_under_the_same_keys() -> None:
    first, again, other = (RunsApi(lambda key, before: "accepted") for _ in range(3))
    for api, demo_id in ((first, "d1"), (again, "d1"), (other, "d2")):
        with api.client() as client:
            play(client, demo_id, wishes(5), nothing)
    assert first.asked.keys() == again.asked.keys()
    assert not first.asked.keys() & other.asked.keys()


def test_a_run_that_goes_on_is_asked_for_again_under_its_key() -> None:
    api = RunsApi(lambda key, before: "accepted" if before == 2 else "running")
    with api.client() as client:
        ran = play(client, "d1", wishes(1), nothing)
    assert ran[0].passed
    assert [len(bodies) for bodies in api.asked.values()] == [3]


def test_a_faulty_run_is_replaced_by_another() -> None:
    api = RunsApi(lambda key, before: "error" if key.endswith("t0-0-0") else "accepted")
    with api.client() as client:
        ran = play(client, "d1", wishes(1), nothing)
    assert ran[0].passed
    assert len(api.asked) == 2


def test_a_few_without_a_verdict_are_left_out_and_many_end_the_demo() -> None:
    api = RunsApi(lambda key, before: "error" if "-t0-" in key else "accepted")
    with api.client() as client:
        ran = play(client, "d1", wishes(5), nothing)
        assert [each.valid for each in ran] == [False, True, True, True, True]
        with pytest.raises(CannotRun, match=r"1 of 4 runs of policy base .* because of"):
            play(client, "d1", wishes(4), nothing)


def test_what_the_api_refuses_is_raised_and_stops_the_others() -> None:
    api = RunsApi(lambda key, before: "refused" if "-t0-" in key else "running")
    with api.client() as client, pytest.raises(ApiProblem, match="there is no policy 'gone'"):
        play(client, "d1", wishes(4), nothing)


def test_an_interrupt_leaves_the_others_behind() -> None:
    def interrupt(each: Ran) -> None:
        raise KeyboardInterrupt

    api = RunsApi(lambda key, before: "accepted" if "-t0-" in key else "running")
    with api.client() as client, pytest.raises(KeyboardInterrupt):
        play(client, "d1", wishes(4), interrupt)


def test_only_measured_runs_carry_gold_policy_and_seed() -> None:
    api = RunsApi(lambda key, before: "accepted")
    task = task_of("t0", split="report", level="easy", connectors={"support_desk": {}})
    wanted = [
        Wish("practice", task),
        Wish("sft", task, 1, RunKind.EVALUATION, "adapter", sampling_seed(7, task, 1)),
    ]
    with api.client() as client:
        play(client, "d1", wanted, nothing)
    production, measured = _bodies(api)
    assert not {"expectation", "policy", "task_id", "split", "sampling"} & production.keys()
    assert production["connectors"] == {"support_desk": {}}
    assert measured["policy"] == "adapter"
    assert measured["expectation"] == task.expectation
    assert measured["sampling"] == {"seed": sampling_seed(7, task, 1)}
    assert (measured["kind"], measured["split"], measured["task_id"]) == (
        "evaluation",
        "report",
        "t0",
    )


def _bodies(api: RunsApi) -> tuple[dict[str, object], dict[str, object]]:
    by_kind = {bodies[0]["kind"]: bodies[0] for bodies in api.asked.values()}
    return by_kind["production"], by_kind["evaluation"]


def test_sampling_seeds_differ_by_task_member_and_demo_only() -> None:
    tasks = [task_of(f"t{n}") for n in range(50)]
    seeds = {sampling_seed(1, task, member) for task in tasks for member in range(4)}
    assert len(seeds) == 200
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert sampling_seed(1, tasks[0], 0) == sampling_seed(1, task_of("t0"), 0)
    assert sampling_seed(2, tasks[0], 0) not in seeds
