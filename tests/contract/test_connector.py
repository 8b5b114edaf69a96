"""What the runtime relies on, for every connector that can be simulated."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from connectors.support_desk import SupportDeskFactory
from runtime.journal import ConnectorStates
from runtime.run import Effect
from runtime.tools import Connector, ConnectorFactory, Tool, ToolContext


@dataclass(frozen=True)
class Subject:
    factory: ConnectorFactory
    tool: str
    """One with an effect, and the arguments of one call."""
    arguments: Mapping[str, Any]


SUBJECTS = [
    Subject(
        SupportDeskFactory(),
        "route_ticket",
        {"queue": "cash", "priority": "low", "reason": "no notes"},
    ),
]


@pytest.fixture(params=SUBJECTS, ids=lambda subject: subject.factory.name)
def subject(request: pytest.FixtureRequest) -> Subject:
    return request.param


async def opened(subject: Subject, states: ConnectorStates, seed: int = 7) -> Connector:
    factory = subject.factory
    return await factory.open(
        mode="simulate", seed=seed, initial=None, state=states.of(factory.name)
    )


def chosen(connector: Connector, subject: Subject) -> Tool:
    return next(tool for tool in connector.tools() if tool.name == subject.tool)


async def act(connector: Connector, subject: Subject, key: str) -> str:
    tool = chosen(connector, subject)
    arguments = tool.validate(subject.arguments)
    return (await tool(ToolContext(run_id="r", key=key), arguments)).content


async def test_it_names_its_tools_before_it_is_opened(subject: Subject):
    connector = await opened(subject, ConnectorStates({}))
    assert [tool.name for tool in connector.tools()] == list(subject.factory.tool_names)


async def test_every_tool_describes_itself_for_a_prompt(subject: Subject):
    for tool in (await opened(subject, ConnectorStates({}))).tools():
        assert tool.description
        assert tool.parameters["type"] == "object"
        assert tool.parameters["additionalProperties"] is False


async def test_equal_seeds_open_equal_systems(subject: Subject):
    first, second, other = [await opened(subject, ConnectorStates({}), seed) for seed in (1, 1, 2)]
    assert first.snapshot() == second.snapshot() != other.snapshot()


async def test_opening_and_looking_save_nothing(subject: Subject):
    states = ConnectorStates({})
    connector = await opened(subject, states)
    connector.snapshot()
    assert states.take() == {}


async def test_an_effect_is_saved_and_survives_the_runner(subject: Subject):
    states = ConnectorStates({})
    before = await opened(subject, states)
    untouched = before.snapshot()
    await act(before, subject, "key-1")
    await before.close()
    saved = states.take()
    assert list(saved) == [subject.factory.name]
    after = await opened(subject, ConnectorStates(saved))
    assert after.snapshot() == before.snapshot() != untouched
    assert after.effects() == {"key-1": 1}


async def test_the_same_key_takes_effect_once_even_after_a_crash(subject: Subject):
    states = ConnectorStates({})
    connector = await opened(subject, states)
    if chosen(connector, subject).effect is not Effect.IDEMPOTENT:
        pytest.skip("only idempotent tools promise this")
    said = await act(connector, subject, "key-1")
    once = connector.snapshot()
    assert await act(connector, subject, "key-1") == said
    reopened = await opened(subject, ConnectorStates(states.take()))
    assert await act(reopened, subject, "key-1") == said
    assert reopened.snapshot() == once
    assert reopened.effects() == {"key-1": 1}


async def test_a_snapshot_is_a_copy(subject: Subject):
    connector = await opened(subject, ConnectorStates({}))
    taken = connector.snapshot()
    taken.clear()
    assert connector.snapshot()


async def test_closing_twice_is_harmless(subject: Subject):
    connector = await opened(subject, ConnectorStates({}))
    await connector.close()
    await connector.close()
