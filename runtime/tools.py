"""Tools and connectors: the protocols, the registry, and a tool's JSON schema from its signature.

A tool is an async function with a name, a one-line description, a JSON schema and an *effect*
(what repeating it would do to the world). A connector is a simulated or live enterprise system
that exports tools; it is opened once per run with a durable `ConnectorState`, so that a simulated
system survives the runner that held it. Connectors import this file and `runtime.errors`, and
nothing else of the runtime.

Scaling out: tools hold no process-wide state; whatever must survive lives in the run record.
"""

import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic_core import ErrorDetails

from runtime.checks.schema import violations
from runtime.errors import DomainError, ToolError
from runtime.run import Effect, Json
from runtime.sandbox.protocol import Sandbox

ConnectorMode = Literal["live", "simulate", "record", "replay"]


@dataclass(frozen=True, slots=True)
class ToolContext:
    """Handed to every call; never seen by the model."""

    run_id: str
    key: str
    """Idempotency key of this call: the same on every retry and after a crash."""
    sandbox: Sandbox | None = None
    seconds_left: float = 60.0


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """`content` is what the model reads, `data` what checks read."""

    content: str
    data: Json = None


class Tool(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def description(self) -> str: ...
    @property
    def parameters(self) -> dict[str, Json]:
        """JSON schema (object) of the arguments."""
        ...

    @property
    def effect(self) -> Effect: ...

    def validate(self, arguments: Mapping[str, Json]) -> dict[str, Json]:
        """The arguments, coerced and complete. Raises ToolError naming each wrong argument."""
        ...

    async def __call__(self, context: ToolContext, arguments: Mapping[str, Json]) -> ToolOutput:
        """Raises ToolError for a failure the agent should read."""
        ...


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """A tool made from an async function `(context, **arguments) -> ToolOutput | str`."""

    name: str
    description: str
    effect: Effect
    arguments: type[BaseModel]
    function: Callable[..., Awaitable[ToolOutput | str]]

    @property
    def parameters(self) -> dict[str, Json]:
        schema = self.arguments.model_json_schema()
        schema.pop("title", None)
        for field in schema.get("properties", {}).values():
            field.pop("title", None)
        return schema

    def validate(self, arguments: Mapping[str, Json]) -> dict[str, Json]:
        try:
            return self.arguments.model_validate(dict(arguments)).model_dump()
        except ValidationError as error:
            raise ToolError(f"{self.name}: {_spell_out(error, self.arguments)}") from error

    async def __call__(self, context: ToolContext, arguments: Mapping[str, Json]) -> ToolOutput:
        output = await self.function(context, **arguments)
        return ToolOutput(output) if isinstance(output, str) else output


FEW_CHOICES = 6
"""More than these are not told again: the policy reads them in the tool's line of its prompt."""


def _spell_out(error: ValidationError, model: type[BaseModel]) -> str:
    """In few tokens: a model reads it, and pays for every one."""
    errors = error.errors()
    problems = "; ".join(
        f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {_why(e)}" for e in errors
    )
    if all(e["type"] not in ("missing", "extra_forbidden") for e in errors):
        return problems
    return f"{problems} (takes: {', '.join(model.model_fields) or 'no arguments'})"


def _why(error: ErrorDetails) -> str:
    choices = error.get("ctx", {}).get("expected", "") if error["type"] == "literal_error" else ""
    if choices.count(",") >= FEW_CHOICES:
        return "not one of its choices"
    return error["msg"].lower()


def tool(
    function: Callable[..., Awaitable[ToolOutput | str]],
    *,
    effect: Effect = Effect.NONE,
    name: str | None = None,
    description: str | None = None,
) -> FunctionTool:
    """Make a tool of an async function whose first parameter is the ToolContext.

    The schema comes from the annotations of the other parameters, the description from the first
    line of the docstring unless given.
    """
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (hints[parameter.name], default)
    tool_name = name or function.__name__
    model = create_model(tool_name, __config__=ConfigDict(extra="forbid"), **fields)
    summary = description or (inspect.getdoc(function) or "").split("\n", 1)[0]
    return FunctionTool(tool_name, summary, effect, model, function)


class FinishTool:
    """The built-in finishing tool of a domain whose answer changes no system: takes the answer."""

    name = "finish"
    description = "Give the final answer."
    effect = Effect.NONE

    def __init__(self, output_schema: Mapping[str, Json]) -> None:
        self.parameters = dict(output_schema)

    def validate(self, arguments: Mapping[str, Json]) -> dict[str, Json]:
        if wrong := violations(self.parameters, dict(arguments)):
            said = [f"{each.field or 'answer'}: {each.message}" for each in wrong[:5]]
            raise ToolError(f"finish: {'; '.join(said)}")
        return dict(arguments)

    async def __call__(self, context: ToolContext, arguments: Mapping[str, Json]) -> ToolOutput:
        return ToolOutput("done", dict(arguments))


class ToolRegistry:
    """The tools one run may call, by name, in the order the domain lists them."""

    def __init__(self, tools: Iterable[Tool]) -> None:
        self._tools: dict[str, Tool] = {}
        for each in tools:
            if each.name in self._tools:
                raise DomainError(f"two tools are named {each.name!r}; tool names are unique")
            self._tools[each.name] = each

    def __iter__(self) -> Iterator[Tool]:
        return iter(self._tools.values())

    def names(self) -> list[str]:
        return list(self._tools)

    def get(self, name: str) -> Tool:
        """Raises ToolError naming what exists."""
        if name not in self._tools:
            raise ToolError(f"there is no tool {name!r}; tools: {', '.join(self._tools)}")
        return self._tools[name]

    def select(self, names: Sequence[str]) -> "ToolRegistry":
        """Raises DomainError for an unknown name."""
        for name in names:
            if name not in self._tools:
                raise DomainError(f"unknown tool {name!r}; known: {', '.join(self._tools)}")
        return ToolRegistry(self._tools[name] for name in names)


# ---------------------------------------------------------------- connectors


class ConnectorState(Protocol):
    """A connector's durable state within one run, given by the runtime.

    What `save` is handed is committed together with the result of the call in progress: a runner
    that dies before the commit leaves neither.
    """

    def load(self) -> dict[str, Json] | None: ...
    def save(self, state: dict[str, Json]) -> None: ...


class Connector(Protocol):
    """An open connector: lives as long as one run on one runner."""

    def tools(self) -> Sequence[Tool]: ...

    def snapshot(self) -> dict[str, Json]:
        """The system's whole state, as `state` checks compare it."""
        ...

    def effects(self) -> dict[str, int]:
        """Idempotency key → how often its effect happened (simulated systems count them)."""
        ...

    async def close(self) -> None: ...


class ConnectorFactory(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def modes(self) -> frozenset[ConnectorMode]: ...
    @property
    def tool_names(self) -> Sequence[str]:
        """Names of the tools an open connector exports: known before any is opened, so that a
        domain naming another is refused when it loads."""
        ...

    async def open(
        self,
        *,
        mode: ConnectorMode,
        seed: int,
        initial: dict[str, Json] | None,
        state: ConnectorState,
    ) -> Connector:
        """Open for one run: from `state` if it holds one, else from `initial`, else from `seed`."""
        ...
