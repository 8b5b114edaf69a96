"""The demo: a domain fails, people correct it, the wheel turns once, and it fails far less.

It does over REST what three kinds of people do: an application submits messages, a support team
corrects what came back, an ML team turns the wheel and measures. Every policy is measured on the
same tasks of the *report* split with the same sampling seeds; nothing before has seen them. What
the gate decides is reported, whatever it is. An interrupted demo goes on where it stopped.

Scaling past one machine: the API, its runners and its workers may be anywhere; this is a client.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deploy.cycle_progress import follow
from deploy.demo.evidence import Seen, result_of
from deploy.demo.journal import Journal
from deploy.demo.result import BEST_OF, STAGES, DemoResult, StageKey
from deploy.demo.runs import Advance, Ran, Wish, play, sampling_seed
from deploy.demo.show import Show, Step
from deploy.demo.tasks import DemoTasks, is_right
from deploy.home import CannotRun
from flywheel.client import WheelClient
from flywheel.lessons.compiler import decisive_fields
from flywheel.records import CycleState, Outcome
from flywheel.schemas import CycleView
from runtime.client import ApiProblem
from runtime.domain import Domain
from runtime.run import RunKind


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """How much of everything."""

    domain: str
    base: str
    """Policy id of the base model."""
    level: str
    seed: int
    corrections: int = 144
    report_tasks: int = 64
    members: int = 2
    """Samples of each report task and policy."""
    best_of_tasks: int = 16
    """Report tasks on which the base model has four tries; the rest have `members`."""
    retried: int = 12
    """Practice failures that are submitted again after a promotion."""
    profile: str | None = None
    """Of the recipe."""
    real: bool = False
    """Messages that people wrote, from the user's files."""

    def fast(self) -> "DemoPlan":
        """As little as shows that every part works."""
        return DemoPlan(
            domain=self.domain,
            base=self.base,
            level=self.level,
            seed=self.seed,
            corrections=24,
            report_tasks=16,
            members=1,
            best_of_tasks=4,
            retried=4,
            profile="fast",
            real=self.real,
        )


@dataclass(frozen=True, slots=True)
class Demo:
    client: WheelClient
    plan: DemoPlan
    domain: Domain
    tasks: DemoTasks
    journal: Journal
    show: Show

    def run(self) -> DemoResult:
        """Raises ApiProblem for what the API refuses, CannotRun where nothing can be measured."""
        self._say_how_it_starts()
        practice = self._practise()
        corrected = self._correct(practice)
        base = self._measure("base", self.plan.base)
        self._give_gate_tasks()
        cycle = self._turn()
        report: dict[StageKey, list[Ran]] = {"base": base}
        for stage in STAGES:
            if (adapter := cycle.adapters.get(stage)) is not None:
                report[stage] = self._measure(stage, adapter)
        again = self._try_again(corrected, cycle)
        seen = Seen(practice, corrected, report, again, cycle)
        return result_of(self.client, self.plan, self.domain, self.tasks, self.journal.notes, seen)

    # ------------------------------------------------------------ before

    def _say_how_it_starts(self) -> None:
        if self.journal.resumed:
            self.show.say("an unfinished demo is here: it goes on where it stopped")
        elif (serving := self._serving()) is not None:
            self.show.say(
                f"[yellow]{serving} serves {self.plan.domain} already[/yellow]: practice meets it, "
                "training goes on from it; --fresh starts from the base model"
            )

    def _serving(self) -> str | None:
        """What production resolves to; None means the base model."""
        for release in self.client.releases(self.plan.domain):
            if release.alias == "production":
                return release.after if release.after != self.plan.base else None
        return None

    # ------------------------------------------------------------ practice

    def _practise(self) -> list[Ran]:
        """Submit messages as an application does, until enough of the answers are wrong."""
        ran: list[Ran] = []
        waiting = list(self.tasks.practice)
        with self.journal.timed("practice"):
            while waiting and (missing := self.plan.corrections - len(self._failures(ran))) > 0:
                wave, waiting = waiting[:missing], waiting[missing:]
                wishes = [Wish("practice", task) for task in wave]
                title = f"{len(wave)} customer messages" if not ran else f"{len(wave)} more"
                with self.show.step(title, len(wave)) as step:
                    ran += play(self.client, self.journal.notes.demo_id, wishes, _ticking(step))
                    step.tell(self._accept_rate(ran))
        return ran

    def _failures(self, ran: Sequence[Ran]) -> list[Ran]:
        """Judged runs whose answer a support team would not leave as it is."""
        return [each for each in ran if each.valid and not self._right(each)]

    def _right(self, ran: Ran) -> bool:
        return is_right(ran.wish.task, ran.run.answer, decisive_fields(self.domain))

    def _accept_rate(self, ran: Sequence[Ran]) -> str:
        right = sum(each.valid and self._right(each) for each in ran)
        return f"{right} of {len(ran)} answered as the team would have"

    def _correct(self, practice: Sequence[Ran]) -> list[Ran]:
        """Give the right answers, as a support team does in its day's work."""
        failures = self._failures(practice)
        done = list(self.journal.notes.corrected)
        title = f"corrections of {len(failures)} of them"
        with self.journal.timed("corrections"), self.show.step(title, len(failures)) as step:
            for each in failures:
                if each.run.id not in done:
                    self._give_correction(each)
                    done.append(each.run.id)
                    self.journal.note(corrected=done)
                step.advance()
            step.tell("each with the answer that would have been right")
        return failures

    def _give_correction(self, ran: Ran) -> None:
        gold = ran.wish.task.expectation or {}
        said = ", ".join(f"{field} {gold[field]}" for field in decisive_fields(self.domain))
        self.client.feedback(
            ran.run.id, rating="down", correction=gold, comment=f"support team: {said}"
        )

    # ------------------------------------------------------------ measuring

    def _measure(self, stage: StageKey, policy: str) -> list[Ran]:
        """One policy on the report split."""
        wishes = list(self._report_wishes(stage, policy))
        name = {"base": "the base model", "sft": "after SFT", "grpo": "after GRPO"}[stage]
        title = f"report split, {name}"
        with self.journal.timed(f"report_{stage}"), self.show.step(title, len(wishes)) as step:
            ran = play(self.client, self.journal.notes.demo_id, wishes, _ticking(step))
            paired = [r for r in ran if r.valid and r.wish.member < self.plan.members]
            passed = sum(each.passed for each in paired)
            step.tell(f"{passed} of {len(paired)} passed ({passed / max(len(paired), 1):.0%})")
        return ran

    def _report_wishes(self, stage: StageKey, policy: str) -> Iterator[Wish]:
        for number, task in enumerate(self.tasks.report):
            tries = BEST_OF if stage == "base" and number < self.plan.best_of_tasks else 0
            for member in range(max(self.plan.members, tries)):
                seed = sampling_seed(self.plan.seed, task, member)
                yield Wish(stage, task, member, RunKind.EVALUATION, policy, seed)

    # ------------------------------------------------------------ the wheel

    def _give_gate_tasks(self) -> None:
        if self.tasks.gate:
            taken = self.client.import_tasks(self.plan.domain, self.tasks.gate, split="gate")
            self.show.say(
                f"[green]✓[/green] held-out tasks for the gate: {taken.stored} new, "
                f"{taken.known} known"
            )

    def _turn(self) -> CycleView:
        """One cycle, followed to its end. Raises CannotRun where it fails or is stopped."""
        cycle_id = self._open_cycle()
        with self.journal.timed("cycle"):
            cycle = follow(self.client, cycle_id, self.show.console)
        if cycle.state is not CycleState.DONE:
            self.journal.note(cycle_id=None)
            raise CannotRun(
                f"cycle {cycle.id} ended {cycle.state}: {cycle.reason or 'nobody said why'}; "
                "the same command goes on with another cycle"
            )
        return cycle

    def _open_cycle(self) -> str:
        """Id of this demo's cycle; one that others opened is let go by first."""
        if (ours := self.journal.notes.cycle_id) is not None and self._known(ours):
            return ours
        while True:
            opened = self.client.create_cycle(
                self.plan.domain,
                profile=self.plan.profile,
                level=None if self.plan.real else self.plan.level,
                seed=self.plan.seed,
            )
            if opened.new:
                self.journal.note(cycle_id=opened.cycle.id)
                return opened.cycle.id
            self.show.say(f"cycle {opened.cycle.id} turns already: the demo's comes after it")
            follow(self.client, opened.cycle.id, self.show.console)

    def _known(self, cycle_id: str) -> bool:
        try:
            self.client.cycle(cycle_id)
        except ApiProblem as problem:
            if problem.status == 404:  # the database is another one
                return False
            raise
        return True

    # ------------------------------------------------------------ after

    def _try_again(self, failures: Sequence[Ran], cycle: CycleView) -> list[Ran]:
        """Some of the practice failures once more, in production, where a release changed it."""
        promoted = cycle.decision is not None and cycle.decision.outcome is Outcome.PROMOTE
        chosen = [each.wish.task for each in failures[: self.plan.retried]] if promoted else []
        if not chosen:
            return []
        title = f"{len(chosen)} of the failed messages again"
        with self.journal.timed("fixed"), self.show.step(title, len(chosen)) as step:
            wishes = [Wish("fixed", task) for task in chosen]
            ran = play(self.client, self.journal.notes.demo_id, wishes, _ticking(step))
            step.tell(self._accept_rate(ran))
        return ran


def _ticking(step: Step) -> Advance:
    """Counts what has ended, by state."""
    states: Counter[str] = Counter()

    def advance(ran: Ran) -> None:
        states[ran.run.state.value] += 1
        step.advance(", ".join(f"{n} {state}" for state, n in states.most_common(3)))

    return advance
