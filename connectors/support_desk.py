"""The support desk of a small bank, simulated: customers, help articles and one ticket to route.

A run sees one current ticket, written by one customer. Tools look customers and articles up and
route the ticket; routing is idempotent: the same key routes once, however often it is repeated,
and the counter that proves it is stored with the state. Everything is seeded: equal seeds give
equal desks. Only `simulate` exists; nothing here pretends to reach a live system.

Replies are kept to a handful of tokens, because small models read them too. Scaling out: a desk
lives in the record of its run, so any runner can open it again.
"""

import copy
import random
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from runtime.errors import DomainError, ToolError
from runtime.tools import (
    ConnectorMode,
    ConnectorState,
    Effect,
    Json,
    Tool,
    ToolContext,
    ToolOutput,
    tool,
)

Queue = Literal[
    "cards",
    "payments",
    "transfers",
    "topups",
    "cash",
    "exchange",
    "fees",
    "refunds",
    "identity",
    "access",
    "fraud",
    "accounts",
    "sales",
    "human",
]
Priority = Literal["low", "normal", "high"]
Reason = Annotated[str, Field(min_length=1, max_length=80)]

Status = Literal["active", "closed"]
Plan = Literal["basic", "plus", "gold"]
Text = Annotated[str, Field(min_length=1, max_length=200)]
Id = Annotated[str, Field(pattern=r"^[A-Z0-9_-]{1,40}$")]
"""Of a customer or ticket: upper case, as looking up makes it, and no dots, which divide paths."""

QUEUES: tuple[str, ...] = get_args(Queue)
STATUSES: tuple[str, ...] = get_args(Status)
PLANS: tuple[str, ...] = get_args(Plan)
CUSTOMERS = 24
DEFAULT_CUSTOMER = "C100"
"""Who wrote the current ticket where nobody says."""
MAX_NAMED = 10
"""Wrong fields told of one initial state."""

_NAMES = (
    "Ada Okoro", "Ben Castillo", "Chiara Russo", "Dmitri Novak", "Elif Demir", "Farah Aziz",
    "Goran Petrov", "Hana Suzuki", "Ivan Horvat", "Jonas Weber", "Kofi Mensah", "Lena Fischer",
    "Mateo Silva", "Nadia Haddad", "Oscar Lind", "Priya Nair", "Quinn Murphy", "Rosa Alvarez",
    "Sven Dahl", "Tara Singh", "Uma Patel", "Viktor Toth", "Wen Zhao", "Yara Costa",
)  # fmt: skip
_ARTICLES = {
    "cards": "Cards arrive within six working days; activate a card in the app.",
    "payments": "A pending card payment settles or returns within seven days.",
    "transfers": "Bank transfers take up to two working days.",
    "topups": "A top-up by card is instant, by bank transfer it takes a day.",
    "cash": "Cash machines pay out up to 500 a day.",
    "exchange": "Currency is exchanged at the market rate of the moment.",
    "fees": "Fees are listed under Pricing in the app.",
    "refunds": "A refund shows within ten days of the merchant's release.",
    "identity": "Identity is verified with a passport or licence and a selfie.",
    "access": "Reset a passcode or unblock a PIN under Security.",
    "fraud": "Freeze your card at once if you see payments that are not yours.",
    "accounts": "Change your address or close the account under Profile.",
    "sales": "Loans, savings and plan upgrades are offered by the sales team.",
}


def seeded(seed: int) -> dict[str, Json]:
    """A desk as it is before the agent touches it: the plain values that `snapshot` returns."""
    dice = random.Random(f"support_desk/{seed}")
    customers = {
        f"C{100 + index}": {
            "name": dice.choice(_NAMES),
            "status": dice.choices(STATUSES, weights=(4, 1))[0],
            "plan": dice.choice(PLANS),
        }
        for index in range(CUSTOMERS)
    }
    return {
        "customers": customers,
        "tickets": {f"T{n}": _old_ticket(dice) for n in sorted(dice.sample(range(200, 900), 3))},
        "ticket": _open_ticket(DEFAULT_CUSTOMER),
    }


def _old_ticket(dice: random.Random) -> dict[str, Json]:
    return {
        "customer_id": f"C{100 + dice.randrange(CUSTOMERS)}",
        "status": "closed",
        "queue": dice.choice(QUEUES),
    }


def _open_ticket(customer_id: str) -> dict[str, Json]:
    routing = {"queue": None, "priority": None, "reason": None}
    return {"customer_id": customer_id, "status": "open", **routing}


# ---------------------------------------------------------------- what a task may fix


class _Fixed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class _Customer(_Fixed):
    name: Text
    status: Status
    plan: Plan


class _OldTicket(_Fixed):
    customer_id: Id
    status: Literal["closed"]
    queue: Queue


class _Ticket(_Fixed):
    customer_id: Id = DEFAULT_CUSTOMER
    status: Literal["open", "routed"] = "open"
    queue: Queue | None = None
    priority: Priority | None = None
    reason: Reason | None = None


class _Initial(_Fixed):
    """The part of a desk that a task fixes; whatever it leaves out comes from the seed."""

    customers: dict[Id, _Customer] = Field(default_factory=dict[str, _Customer])
    tickets: dict[Id, _OldTicket] = Field(default_factory=dict[str, _OldTicket])
    ticket: _Ticket = _Ticket()


def _merged(initial: Mapping[str, Json], seed: int) -> dict[str, Json]:
    """The seeded desk with what a task fixes: customers are added, the other keys replaced.

    Raises DomainError naming each field of the wrong shape.
    """
    desk = seeded(seed)
    fixed = _checked(initial).model_dump(exclude_unset=True)
    customers = {**desk["customers"], **fixed.pop("customers", {})}
    ticket = {**desk["ticket"], **fixed.pop("ticket", {})}
    return {**desk, **fixed, "customers": customers, "ticket": ticket}


def _checked(initial: Json) -> _Initial:
    if not isinstance(initial, Mapping):
        raise DomainError("support_desk: the initial state is not an object; allowed: an object")
    if unknown := sorted(map(str, set(initial) - set(_Initial.model_fields))):
        allowed = ", ".join(_Initial.model_fields)
        raise DomainError(f"support_desk: unknown state {unknown}; allowed: {allowed}")
    try:
        return _Initial.model_validate(initial)
    except ValidationError as error:
        wrong = [_said(each) for each in error.errors()[:MAX_NAMED]]
        raise DomainError(f"support_desk: initial state: {'; '.join(wrong)}") from error


def _said(error: ErrorDetails) -> str:
    where = ".".join(str(part) for part in error["loc"] if part != "[key]")
    return f"{where}: {error['msg'][:1].lower()}{error['msg'][1:]}"


# ---------------------------------------------------------------- the open desk


class SupportDesk:
    """An open desk: state in memory, stored through `ConnectorState` at every change."""

    def __init__(
        self, desk: dict[str, Any], effects: dict[str, int], state: ConnectorState
    ) -> None:
        self._desk = desk
        self._effects = effects
        self._state = state

    def tools(self) -> Sequence[Tool]:
        return [
            tool(self.lookup_customer),
            tool(self.search_articles),
            tool(self.route_ticket, effect=Effect.IDEMPOTENT),
        ]

    def snapshot(self) -> dict[str, Json]:
        return copy.deepcopy(self._desk)

    def effects(self) -> dict[str, int]:
        return dict(self._effects)

    async def close(self) -> None:
        """Nothing is held open."""

    async def lookup_customer(self, context: ToolContext, customer_id: str) -> ToolOutput:
        """Status and plan of a customer."""
        customers = cast("dict[str, dict[str, Json]]", self._desk["customers"])
        wanted = customer_id.strip().upper() or cast(str, self._desk["ticket"]["customer_id"])
        if wanted not in customers:
            raise ToolError(f"no customer {customer_id!r}; ids look like {DEFAULT_CUSTOMER}")
        found = customers[wanted]
        said = f"status {found['status']}, plan {found['plan']}"
        return ToolOutput(said, {"customer_id": wanted, **found})

    async def search_articles(self, context: ToolContext, query: str) -> ToolOutput:
        """Search help articles."""
        words = _stems(query)
        scored = [(len(words & _stems(f"{k} {text}")), k) for k, text in _ARTICLES.items()]
        best, topic = max(scored, key=lambda pair: pair[0])
        if best == 0:
            return ToolOutput("no article found", {"articles": []})
        return ToolOutput(f"{topic}: {_ARTICLES[topic]}", {"articles": [topic]})

    async def route_ticket(
        self, context: ToolContext, queue: Queue, priority: Priority, reason: Reason
    ) -> ToolOutput:
        """Route the ticket."""
        if not reason.strip():
            raise ToolError("route_ticket: reason: say why in a few words")
        data: dict[str, Json] = {"queue": queue, "priority": priority, "reason": reason}
        if context.key not in self._effects:
            self._desk["ticket"] |= {"status": "routed", **data}
            self._effects[context.key] = 1
            self._state.save({"desk": self.snapshot(), "effects": self.effects()})
        return ToolOutput(f"routed to {queue}", data)


def _stems(text: str) -> set[str]:
    """Words without their endings, so that `refunded` finds `refund`."""
    words = "".join(c if c.isalnum() else " " for c in text.lower()).split()
    return {word[:5] for word in words if len(word) > 3}


class SupportDeskFactory:
    """Opens simulated desks."""

    name = "support_desk"
    modes: frozenset[ConnectorMode] = frozenset({"simulate"})
    tool_names: Sequence[str] = ("lookup_customer", "search_articles", "route_ticket")

    async def open(
        self,
        *,
        mode: ConnectorMode,
        seed: int,
        initial: dict[str, Json] | None,
        state: ConnectorState,
    ) -> SupportDesk:
        """Raises DomainError for any mode but `simulate`, and for a state it does not know."""
        if mode not in self.modes:
            raise DomainError(
                f"support_desk cannot run {mode!r}: no live ticket system is configured; "
                "allowed: connectors: {support_desk: simulate}"
            )
        stored = state.load()
        if stored is not None:
            return SupportDesk(copy.deepcopy(stored["desk"]), dict(stored["effects"]), state)
        return SupportDesk(_merged({} if initial is None else initial, seed), {}, state)
