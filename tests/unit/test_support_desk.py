"""The simulated support desk: what its tools say and change."""

from typing import Any

import pytest

from connectors.support_desk import (
    DEFAULT_CUSTOMER,
    QUEUES,
    SupportDesk,
    SupportDeskFactory,
    seeded,
)
from runtime.errors import DomainError, ToolError
from runtime.journal import ConnectorStates
from runtime.tools import ToolContext, ToolOutput

ANSWER = {"queue": "cards", "priority": "low", "reason": "card not arrived"}


async def opened(
    states: ConnectorStates | None = None, initial: dict[str, Any] | None = None, seed: int = 0
) -> SupportDesk:
    return await SupportDeskFactory().open(
        mode="simulate",
        seed=seed,
        initial=initial,
        state=(states or ConnectorStates({})).of("support_desk"),
    )


async def call(desk: SupportDesk, name: str, key: str = "k", **arguments: Any) -> ToolOutput:
    tool = next(tool for tool in desk.tools() if tool.name == name)
    return await tool(ToolContext(run_id="r", key=key), tool.validate(arguments))


async def test_equal_seeds_give_equal_desks_and_plans_vary():
    assert (await opened(seed=3)).snapshot() == seeded(3) != seeded(4)
    plans = {c["plan"] for c in seeded(3)["customers"].values()}
    statuses = {c["status"] for seed in range(5) for c in seeded(seed)["customers"].values()}
    assert plans == {"basic", "plus", "gold"}
    assert statuses == {"active", "closed"}


async def test_looking_up_tells_status_and_plan_in_a_few_words():
    initial = {"customers": {"C417": {"name": "Ada", "status": "closed", "plan": "gold"}}}
    desk = await opened(initial=initial)
    before = desk.snapshot()
    found = await call(desk, "lookup_customer", customer_id=" c417 ")
    assert found.content == "status closed, plan gold"
    assert found.data == {"customer_id": "C417", **initial["customers"]["C417"]}
    assert desk.snapshot() == before


async def test_nobody_named_means_the_writer_of_the_ticket():
    found = await call(await opened(), "lookup_customer", customer_id="")
    assert found.data["customer_id"] == DEFAULT_CUSTOMER


async def test_an_unknown_customer_is_an_observation():
    with pytest.raises(ToolError, match="no customer 'C999'; ids look like C100"):
        await call(await opened(), "lookup_customer", customer_id="C999")


@pytest.mark.parametrize(
    ("query", "said"),
    [("where is my refund", "refunds: "), ("unblock pin", "access: "), ("zebra", "no article")],
)
async def test_searching_articles(query: str, said: str):
    assert (await call(await opened(), "search_articles", query=query)).content.startswith(said)


async def test_routing_changes_the_ticket_and_nothing_else():
    desk = await opened()
    before = desk.snapshot()
    assert (await call(desk, "route_ticket", **ANSWER)).content == "routed to cards"
    after = desk.snapshot()
    assert after.pop("ticket") == {**before.pop("ticket"), "status": "routed", **ANSWER}
    assert after == before


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"queue": "loans"}, "queue: not one of its choices"),
        ({"priority": "urgent"}, "priority: input should be 'low', 'normal' or 'high'"),
        ({"reason": ""}, "reason: string should have at least 1 character"),
        ({"reason": "  "}, "reason: say why"),
        ({"reason": "x" * 81}, "reason: string should have at most 80 characters"),
        ({"note": "x"}, "note: extra inputs are not permitted"),
    ],
)
async def test_wrong_arguments_are_named_and_change_nothing(wrong: dict[str, Any], said: str):
    desk = await opened()
    with pytest.raises(ToolError, match=said):
        await call(desk, "route_ticket", **{**ANSWER, **wrong})
    assert desk.snapshot() == seeded(0)
    assert desk.effects() == {}


async def test_routing_again_with_another_key_moves_the_ticket():
    desk = await opened()
    await call(desk, "route_ticket", key="1", **ANSWER)
    await call(desk, "route_ticket", key="2", **{**ANSWER, "queue": "cash"})
    assert desk.snapshot()["ticket"]["queue"] == "cash"
    assert desk.effects() == {"1": 1, "2": 1}


async def test_what_a_task_fixes_replaces_what_the_seed_gave():
    desk = await opened(initial={"ticket": {"customer_id": "C111"}})
    assert desk.snapshot()["ticket"]["customer_id"] == "C111"
    assert desk.snapshot()["ticket"]["status"] == "open"
    with pytest.raises(DomainError, match="unknown state \\['tiket'\\]; allowed: customers"):
        await opened(initial={"tiket": {}})


WRONG_STATES: dict[str, tuple[Any, str]] = {
    "customers as a list": ({"customers": [1]}, "customers: "),
    "a customer as text": ({"customers": {"C1": "x"}}, "customers.C1: "),
    "an unknown status": (
        {"customers": {"C1": {"name": "A", "status": "gone", "plan": "plus"}}},
        "customers.C1.status: input should be 'active' or 'closed'",
    ),
    "a customer without a plan": (
        {"customers": {"C1": {"name": "A", "status": "active"}}},
        "customers.C1.plan: field required",
    ),
    "a number that is no id": (
        {"customers": {"c 1": {"name": "A", "status": "active", "plan": "plus"}}},
        "customers.c 1: string should match",
    ),
    "a ticket as a number": ({"ticket": 7}, "ticket: "),
    "a ticket in no queue": ({"ticket": {"queue": "loans"}}, "ticket.queue: "),
    "a field that tickets lack": ({"ticket": {"owner": "x"}}, "ticket.owner: extra inputs"),
    "tickets as null": ({"tickets": None}, "tickets: "),
    "an old ticket without a customer": ({"tickets": {"T1": {}}}, "tickets.T1.customer_id: "),
    "no object": ([], "an object"),
}


@pytest.mark.parametrize("case", WRONG_STATES)
async def test_a_state_of_the_wrong_shape_is_named(case: str):
    initial, said = WRONG_STATES[case]
    with pytest.raises(DomainError, match="support_desk: ") as refused:
        await opened(initial=initial)
    assert said in str(refused.value)


async def test_every_snapshot_can_be_opened_again():
    desk = await opened(seed=3)
    await call(desk, "route_ticket", **ANSWER)
    assert (await opened(initial=desk.snapshot(), seed=4)).snapshot()["ticket"]["queue"] == "cards"


async def test_there_is_no_live_desk():
    with pytest.raises(DomainError, match=r"cannot run 'live'.*allowed: connectors"):
        await SupportDeskFactory().open(
            mode="live", seed=0, initial=None, state=ConnectorStates({}).of("support_desk")
        )


def test_there_are_enough_queues():
    assert len(QUEUES) >= 12
