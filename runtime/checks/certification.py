"""Certification: proof, without a model, that a domain's checks tell good work from bad.

For every task sampled the demonstration of its gold must pass; an attempt that does nothing, one
that finishes with nothing filled in, and one that answers at random must fail; and three gradings
of the same artefacts must agree byte for byte. Attempts are played through the real loop, tools and
sandbox by the `AttemptPlayer` handed in. What fails is named by task id, and an uncertified domain
feeds no pool. This is the basic level; mutants and known hacks make the full one.

Where `tasks.py` says what a message reveals (`Latent`), baselines are computed over a larger
population: the best that any policy without look-ups can do, a keyword classifier trained on the
practice split, and how many tasks the customer's state and an attachment decide. The bounds a
domain sets for them are part of its certification.

Everything is a pure function of domain and seed, so shards of the sample can be certified on
several machines and their failures concatenated.
"""

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

from pydantic import Field

from runtime.checks.baselines import Latent, measures, shortfalls
from runtime.checks.protocol import Artefacts
from runtime.checks.verdict import run_checks, verifier_digest
from runtime.domain import Domain, TaskSource
from runtime.errors import CheckError
from runtime.run import Json, Record, Task, ToolCall, Verdict, VerdictStatus

GRADINGS = 3
MAX_FAILURES = 20
KINDS = ("gold", "empty", "do_nothing", "random")


class Attempt(Protocol):
    """One attempt as it ended; both are None where the machinery failed."""

    @property
    def artefacts(self) -> Artefacts | None: ...
    @property
    def verdict(self) -> Verdict | None: ...


AttemptPlayer = Callable[[Domain, Task, list[list[ToolCall]]], Awaitable[Attempt]]
"""Plays turns (tool calls per turn) through the real loop and grades with the task's gold.

After the last turn the agent says nothing usable until a limit ends the run: no turns at all is an
agent that does nothing.
"""


class Rate(Record):
    """How many attempts of a kind passed."""

    passed: int
    n: int

    @property
    def rate(self) -> float:
        return self.passed / self.n if self.n else 0.0


class Certification(Record):
    """What `noria domain validate` prints for one domain."""

    name: str
    digest: str
    verifier_digest: str
    level: Literal["basic"] = "basic"
    certified: bool
    tasks: int
    """Tasks sampled, spread over levels and splits."""
    seed: int
    gold: Rate
    empty: Rate
    do_nothing: Rate
    random: Rate
    gradings_agree: bool
    no_lookup: float | None = None
    """Share right of the best policy that sees only the message (worst level); None if unknown."""
    keyword: float | None = None
    """Share right of a keyword classifier on the splits it was not trained on (worst level)."""
    decided_by_state: float | None = None
    decided_by_attachment: float | None = None
    """Shares of tasks (lowest level)."""
    distinct_messages: int | None = None
    levels: dict[str, dict[str, float]] = Field(default_factory=dict[str, dict[str, float]])
    """The same measures for each level."""
    failures: list[str] = Field(default_factory=list[str])
    """What is wrong, each naming its task; at most 20."""


@dataclass(slots=True)
class _Tally:
    passed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    tasks: int = 0
    agree: bool = True
    failures: list[str] = field(default_factory=list[str])

    def rate(self, kind: str) -> Rate:
        return Rate(passed=self.passed[kind], n=self.tasks)


async def certify(
    domain: Domain,
    *,
    attempt: AttemptPlayer,
    sample: int = 40,
    seed: int = 0,
    levels: Sequence[str] | None = None,
    splits: Sequence[str] | None = None,
    population: int = 1_200,
) -> Certification:
    """Certify a domain on `sample` tasks spread over its levels and splits.

    `population` tasks for each split and level feed the baselines. A domain without tasks is not
    certified. Raises CheckError naming the task where an attempt ended without a verdict, and
    whatever the player raises: a fault of the machinery is no result.
    """
    tally = _Tally()
    levels, splits = levels or domain.levels, splits or domain.splits
    source = domain.source
    if source is None or not splits:
        tally.failures.append(f"{domain.name} has no tasks.py or no splits: nothing to certify on")
        return _certification(domain, tally, {}, seed)
    for task in _sampled(source, levels, splits, sample, seed):
        await _certify_task(domain, source, task, attempt, tally)
    found: dict[str, dict[str, float]] = {}
    if isinstance(source, Latent):
        found = {level: measures(source, level, splits, population, seed) for level in levels}
        tally.failures += shortfalls(source, found)
    return _certification(domain, tally, found, seed)


def _sampled(
    source: TaskSource, levels: Sequence[str], splits: Sequence[str], sample: int, seed: int
) -> list[Task]:
    """About `sample` tasks, as many from each level and split."""
    each = max(1, -(-sample // (len(levels) * len(splits))))
    return [
        task
        for level in levels
        for split in splits
        for task in source.generate(split=split, level=level, count=each, seed=seed)
    ]


async def _certify_task(
    domain: Domain, source: TaskSource, task: Task, attempt: AttemptPlayer, tally: _Tally
) -> None:
    tally.tasks += 1
    if task.expectation is None:
        tally.failures.append(f"{task.id}: the task has no gold")
        return
    turns = {
        "gold": source.demonstrate(task, task.expectation),
        "empty": [[_finish(domain, {})]],
        "do_nothing": [],
        "random": [[_finish(domain, _random_answer(domain, task))]],
    }
    for kind in KINDS:
        artefacts, verdict = _ended(task, kind, await attempt(domain, task, turns[kind]))
        tally.passed[kind] += verdict.status is VerdictStatus.PASS
        if problem := _problem(kind, verdict):
            tally.failures.append(f"{task.id}: {problem}")
        if kind == "gold" and not _gradings_agree(domain, task, artefacts, verdict):
            tally.agree = False
            tally.failures.append(f"{task.id}: {GRADINGS} gradings of gold do not agree")


def _ended(task: Task, kind: str, played: Attempt) -> tuple[Artefacts, Verdict]:
    if played.artefacts is None or played.verdict is None:
        raise CheckError(f"{task.id}: the {kind} attempt ended without a verdict")
    return played.artefacts, played.verdict


def _finish(domain: Domain, answer: dict[str, Json]) -> ToolCall:
    return ToolCall(id="0.0", name=domain.finish, arguments=answer)


def _problem(kind: str, verdict: Verdict) -> str | None:
    wanted = VerdictStatus.PASS if kind == "gold" else VerdictStatus.FAIL
    if verdict.status is wanted:
        return None
    culprits = [
        f"{c.name} ({c.reason})"
        for c in verdict.checks
        if c.status == "error" or (c.required and c.status == "failed")
    ]
    said = f"; {', '.join(culprits)}" if culprits else ""
    return f"{kind} should {wanted.value} but the verdict is {verdict.status.value}{said}"


def _gradings_agree(domain: Domain, task: Task, artefacts: Artefacts, verdict: Verdict) -> bool:
    digest = verifier_digest(domain)
    gradings = {
        run_checks(
            domain.checks,
            artefacts,
            task.expectation,
            reward=domain.reward,
            verifier_digest=digest,
        ).canonical()
        for _ in range(GRADINGS)
    }
    return gradings == {verdict.canonical()}


# ---------------------------------------------------------------- random answers


def _random_answer(domain: Domain, task: Task) -> dict[str, Json]:
    """A well-formed answer drawn blindly, and drawn again while it is right by luck."""
    dice = random.Random(f"{domain.name}/{task.id}")
    source = domain.source
    decisive = source.decisive if isinstance(source, Latent) else tuple(task.expectation or {})
    answer = cast("dict[str, Json]", random_value(domain.output_schema, dice))
    for _ in range(100):
        if any(answer.get(name) != (task.expectation or {}).get(name) for name in decisive):
            break
        answer = cast("dict[str, Json]", random_value(domain.output_schema, dice))
    return answer


def random_value(schema: dict[str, Any], dice: random.Random) -> Json:
    """A value drawn from a JSON Schema's enums, types and bounds (patterns are ignored)."""
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return dice.choice(schema["enum"])
    match schema.get("type"):
        case "object":
            properties = cast("dict[str, dict[str, Any]]", schema.get("properties", {}))
            return {name: random_value(each, dice) for name, each in properties.items()}
        case "array":
            items = cast("dict[str, Any]", schema.get("items", {}))
            return [random_value(items, dice) for _ in range(schema.get("minItems", 1))]
        case "integer":
            return dice.randint(*_bounds(schema))
        case "number":
            return dice.uniform(*_bounds(schema))
        case "boolean":
            return dice.random() < 0.5
        case "null":
            return None
        case _:
            return _random_text(schema, dice)


def _bounds(schema: dict[str, Any]) -> tuple[int, int]:
    low = int(schema.get("minimum", 0))
    return low, max(low, int(schema.get("maximum", low + 1_000)))


def _random_text(schema: dict[str, Any], dice: random.Random) -> str:
    length = max(int(schema.get("minLength", 1)), min(12, int(schema.get("maxLength", 12))))
    return "".join(dice.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(length))


# ---------------------------------------------------------------- the result


def _certification(
    domain: Domain, tally: _Tally, found: dict[str, dict[str, float]], seed: int
) -> Certification:
    def over_levels(measure: str, worst: Callable[[list[float]], float]) -> float | None:
        values = [each[measure] for each in found.values() if measure in each]
        return worst(values) if values else None

    distinct = over_levels("distinct_messages", min)
    return Certification(
        name=domain.name,
        digest=domain.digest,
        verifier_digest=verifier_digest(domain),
        certified=not tally.failures,
        tasks=tally.tasks,
        seed=seed,
        gold=tally.rate("gold"),
        empty=tally.rate("empty"),
        do_nothing=tally.rate("do_nothing"),
        random=tally.rate("random"),
        gradings_agree=tally.agree and tally.tasks > 0,
        no_lookup=over_levels("no_lookup", max),
        keyword=over_levels("keyword", max),
        decided_by_state=over_levels("decided_by_state", min),
        decided_by_attachment=over_levels("decided_by_attachment", min),
        distinct_messages=None if distinct is None else int(distinct),
        levels=found,
        failures=tally.failures[:MAX_FAILURES],
    )
