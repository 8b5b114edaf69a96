"""Tasks for support triage: a customer, a message, sometimes a letter, and where it belongs.

A `Draw` is what really happened (topic, plan, status, attached or not); the message shows part of
it. The plan sets the priority, a closed account turns sales away, a letter hides the topic: so a
message alone rarely decides, which `observable` and `decided_by` make measurable. A task is a
function of (split, level, seed, number), and its id says which.

`gold` is the written rules as a function; `ruled` is the same for mail from elsewhere, of which
`imported` makes tasks: the queue is known, the customer is drawn, the rules give the rest.
"""

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml

from runtime.checks.document import Condition
from runtime.errors import InputError
from runtime.run import Json, Task, ToolCall

from .wording import SLOTS, letter, message, phrases_of, pointer

DOMAIN = "support_triage"
LEVELS = ("easy", "full")
SPLITS = ("practice", "gate", "report")
PLANS = {"basic": "low", "plus": "normal", "gold": "high"}
"""Plan → priority."""
DEFAULT_CUSTOMER = "C100"
ATTACHED_SHARE = 0.3
CLOSED_SHARE = 0.2
CLOSED_SHARE_SALES = 0.5
FRAUD_WEIGHT = 1.2
SALES_WEIGHT = 1.6
HIGH = {"field": "answer.priority", "value": "high"}
"""Parameters of the checks that demand high priority."""

decisive = ("queue", "priority")
"""Fields of the answer that make it right or wrong; the reason is free text."""
at_most = {"no_lookup": 0.5, "keyword": 0.6}
at_least = {"decided_by_state": 0.3, "decided_by_attachment": 0.2, "distinct_messages": 2_000.0}
"""What certification holds this domain to."""


class Topic(NamedTuple):
    queue: str
    reason: str
    easy: bool = False
    """Level easy has one topic for each queue."""


PLAIN_SENTENCES = 3
"""Level easy says a topic in the first few of its sentences, which name it."""


TOPICS = {
    "card_delivery": Topic("cards", "card not arrived", easy=True),
    "card_activation": Topic("cards", "activate card"),
    "card_expiry": Topic("cards", "replacement card"),
    "payment_declined": Topic("payments", "payment declined", easy=True),
    "payment_pending": Topic("payments", "payment pending"),
    "transfer_missing": Topic("transfers", "transfer not arrived", easy=True),
    "transfer_cancel": Topic("transfers", "stop transfer"),
    "topup_failed": Topic("topups", "top-up failed", easy=True),
    "topup_auto": Topic("topups", "top-up question"),
    "cash_amount": Topic("cash", "wrong cash amount", easy=True),
    "cash_refused": Topic("cash", "cash machine problem"),
    "exchange_rate": Topic("exchange", "exchange rate", easy=True),
    "exchange_how": Topic("exchange", "change currency"),
    "fee_unexpected": Topic("fees", "unexpected fee", easy=True),
    "fee_list": Topic("fees", "fee question"),
    "refund_missing": Topic("refunds", "refund missing", easy=True),
    "refund_wanted": Topic("refunds", "wants refund"),
    "verify_failed": Topic("identity", "verification failed", easy=True),
    "verify_why": Topic("identity", "verification question"),
    "pin_blocked": Topic("access", "PIN problem", easy=True),
    "login_lost": Topic("access", "cannot log in"),
    "card_stolen": Topic("fraud", "stolen card", easy=True),
    "scammed": Topic("fraud", "scam"),
    "payment_unknown": Topic("fraud", "unknown payment"),
    "account_close": Topic("accounts", "close account", easy=True),
    "account_details": Topic("accounts", "account details"),
    "loan": Topic("sales", "wants loan", easy=True),
    "upgrade": Topic("sales", "wants product"),
    "off_topic": Topic("human", "not banking", easy=True),
    "other_business": Topic("human", "not a customer matter"),
}


@dataclass(frozen=True, slots=True)
class Draw:
    """What really happened: everything the gold depends on."""

    topic: str
    plan: str
    status: str
    attached: bool


# ---------------------------------------------------------------- the written rules


def gold(topic: str, plan: str, status: str) -> dict[str, Json]:
    """The answer the rules of prompt.md demand for a topic."""
    queue, reason, _ = TOPICS[topic]
    return ruled(queue, reason, plan=plan, status=status)


def ruled(
    queue: str, reason: str, *, plan: str, status: str, urgent: bool = False
) -> dict[str, Json]:
    """The answer where the mail itself belongs to `queue`; `urgent` where it speaks of fraud."""
    if queue == "sales" and status == "closed":
        queue, reason = "accounts", "account is closed"
    priority = "high" if urgent or queue == "fraud" else PLANS[plan]
    return {"queue": queue, "priority": priority, "reason": reason}


def _decisive(draw: Draw) -> tuple[Json, ...]:
    answer = gold(draw.topic, draw.plan, draw.status)
    return tuple(answer[field] for field in decisive)


# ---------------------------------------------------------------- generating


def generate(*, split: str, level: str, count: int, seed: int) -> list[Task]:
    """`count` tasks, distinct in what the customer sent (message and letter). Raises InputError for
    an unknown split or level, or where the phrases cannot say that many different things."""
    for name, value, known in (("split", split, SPLITS), ("level", level, LEVELS)):
        if value not in known:
            raise InputError(f"unknown {name} {value!r}; allowed: {', '.join(known)}")
    tasks: dict[tuple[str, bytes], Task] = {}
    for number in range(4 * count + 100):
        if len(tasks) == count:
            break
        task = _task(split, level, seed, number)
        tasks.setdefault((task.input["message"], b"".join(task.files.values())), task)
    if len(tasks) < count:
        raise InputError(f"{split}/{level} has only {len(tasks)} distinct tasks, not {count}")
    return list(tasks.values())


def _dice(split: str, level: str, seed: int, number: int) -> random.Random:
    return random.Random(f"{DOMAIN}/{split}/{level}/{seed}/{number}")


def _draw(dice: random.Random, level: str) -> Draw:
    queues = sorted({topic.queue for topic in TOPICS.values()})
    special = {"fraud": FRAUD_WEIGHT, "sales": SALES_WEIGHT}
    queue = dice.choices(queues, weights=[special.get(q, 1.0) for q in queues])[0]
    topics = [n for n, t in TOPICS.items() if t.queue == queue and (t.easy or level == "full")]
    closed = CLOSED_SHARE_SALES if queue == "sales" else CLOSED_SHARE
    return Draw(
        topic=dice.choice(topics),
        plan=dice.choice(list(PLANS)),
        status="closed" if dice.random() < closed else "active",
        attached=dice.random() < ATTACHED_SHARE,
    )


def _task(split: str, level: str, seed: int, number: int) -> Task:
    dice = _dice(split, level, seed, number)
    draw = _draw(dice, level)
    phrases = phrases_of(split)
    family = dice.choice(list(phrases.families))
    sentences = phrases.topics[draw.topic][: PLAIN_SENTENCES if level == "easy" else None]
    core, files = dice.choice(sentences), dict[str, bytes]()
    customer = f"C{dice.randrange(200, 1000)}"
    given: dict[str, Json] = {"customer_id": customer}
    if draw.attached:
        name = dice.choice(SLOTS["file"])
        files[name] = letter(split, core, dice).encode()
        core = pointer(split, level, name, dice)
        given["attachment"] = name
    given["message"] = message(split, family, level, core, dice)
    desk = _desk(customer, dice.choice(SLOTS["person"]), draw.plan, draw.status)
    return Task(
        id=f"{split}-{level}-{seed}-{number}",
        domain=DOMAIN,
        input=given,
        files=files,
        seed=seed,
        connectors={"support_desk": desk},
        expectation=gold(draw.topic, draw.plan, draw.status),
        split=split,
        level=level,
        family=family,
    )


def _desk(customer: str, name: str, plan: str, status: str) -> dict[str, Json]:
    """The support desk as a task fixes it: who wrote, and what they have."""
    record = {"name": name, "status": status, "plan": plan}
    return {"customers": {customer: record}, "ticket": {"customer_id": customer}}


# ---------------------------------------------------------------- mail from elsewhere


def imported(text: str, label: str, *, seed: int) -> Task:
    """A task of a real message whose queue people know. Its customer depends on seed and message
    alone, so that importing a file again, in any order, makes the same tasks.

    Raises InputError for a label that is no queue.
    """
    queues = sorted({topic.queue for topic in TOPICS.values()})
    if label not in queues:
        raise InputError(f"unknown queue {label!r}; queues: {', '.join(queues)}")
    dice = random.Random(f"{DOMAIN}/imported/{seed}/{text}")
    customer = f"C{dice.randrange(200, 1000)}"
    plan = dice.choice(list(PLANS))
    closed = CLOSED_SHARE_SALES if label == "sales" else CLOSED_SHARE
    status = "closed" if dice.random() < closed else "active"
    name = dice.choice(SLOTS["person"])
    reason = "needs a person" if label == "human" else f"{label} question"
    return Task(
        id=f"imported-{seed}-{hashlib.sha256(text.encode()).hexdigest()[:16]}",
        domain=DOMAIN,
        input={"customer_id": customer, "message": text},
        seed=seed,
        connectors={"support_desk": _desk(customer, name, plan, status)},
        expectation=ruled(label, reason, plan=plan, status=status, urgent=_speaks_of_fraud(text)),
    )


@cache
def _fraud_rules() -> tuple[Condition, ...]:
    """When a message itself demands high priority, as domain.yaml says."""
    declared = yaml.safe_load((Path(__file__).parent / "domain.yaml").read_text("utf-8"))
    return tuple(
        Condition.model_validate(check["when"])
        for check in declared["checks"]
        if check.get("parameters") == HIGH and check["when"]["field"] == "input.message"
    )


def _speaks_of_fraud(text: str) -> bool:
    return any(rule.holds({"input": {"message": text}}) for rule in _fraud_rules())


# ---------------------------------------------------------------- demonstrating


def demonstrate(task: Task, expectation: Mapping[str, Json]) -> list[list[ToolCall]]:
    """Read the attachment if there is one, look the customer up, route: one call a turn."""
    calls: list[tuple[str, dict[str, Json]]] = []
    if attachment := task.input.get("attachment"):
        calls.append(("read_file", {"path": attachment}))
    customer = task.input.get("customer_id", DEFAULT_CUSTOMER)
    calls.append(("lookup_customer", {"customer_id": customer}))
    answer = {field: expectation[field] for field in ("queue", "priority", "reason")}
    calls.append(("route_ticket", answer))
    return [
        [ToolCall(id=f"{step}.0", name=name, arguments=arguments)]
        for step, (name, arguments) in enumerate(calls)
    ]


# ---------------------------------------------------------------- what a message alone can tell


def drawn(task: Task) -> Draw:
    """What really happened in a generated task. Raises InputError for any other task."""
    try:
        split, level, seed, number = task.id.split("-")
        if split not in SPLITS or level not in LEVELS:
            raise ValueError(f"no split {split} and level {level}")
        return _draw(_dice(split, level, int(seed), int(number)), level)
    except ValueError as error:
        raise InputError(f"task {task.id!r} was not generated by {DOMAIN}") from error


def observable(task: Task) -> str:
    """Everything about the answer that the message alone can tell: the topic, unless a letter hides
    it. The rest of the wording is drawn independently of the answer."""
    draw = drawn(task)
    return "letter" if draw.attached else draw.topic


def decided_by(task: Task) -> frozenset[str]:
    """`state` where another customer, `attachment` where another letter would change the answer."""
    draw = drawn(task)
    others = [replace(draw, plan=p, status=s) for p in PLANS for s in ("active", "closed")]
    letters = [replace(draw, topic=topic) for topic in TOPICS] if draw.attached else []
    found = {"state"} if any(_decisive(o) != _decisive(draw) for o in others) else set[str]()
    if any(_decisive(o) != _decisive(draw) for o in letters):
        found.add("attachment")
    return frozenset(found)
