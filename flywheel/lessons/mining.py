"""Mining: which production runs failed, how, and are they new.

A run is a candidate where something new speaks against it: a person's correction or bad rating, or
else its own verdict, where checks rejected it or its limits ended it. A later correction of a run
replaces an earlier one. Candidates that were asked the same (normalised message, same files) and
given the same right answer are one; the oldest stands for them.

All decisions are pure functions of what the evidence says; tenants and domains are mined apart, so
they can be mined on any number of machines.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import groupby

from pydantic import Field

from flywheel.lessons.evidence import Asked, Evidence, Heard, Seen
from flywheel.records import Cycle
from flywheel.store import Connection
from runtime.checks.document import normalised
from runtime.run import Json, Record, RunId, RunState

MERGED = "merged"


class Category(StrEnum):
    CORRECTED = "corrected"
    CONFIRMED = "confirmed"
    """A person gave the answer that the run had given: a lesson all the same."""
    DOWN_RATED = "down_rated"
    REJECTED = "rejected"
    TIMED_OUT = "timed_out"


class Candidate(Record):
    """A run that may teach something."""

    run_id: RunId
    seq: int
    """Of the feedback in the run's record; 0 for a failure nobody spoke about."""
    category: str
    correction: dict[str, Json] | None = None
    by: str = ""


class Mined(Record):
    candidates: list[Candidate]
    """By age of the run; near-duplicates are left out."""
    counts: dict[str, int] = Field(default_factory=dict[str, int])
    """Category → candidates found, and `merged`: how many of them were near-duplicates."""


def mine(connection: Connection, cycle: Cycle) -> Mined:
    """What the cycle's domain can learn from, with a note in the book of all that was looked at.

    Asking again within one cycle finds the same, and what came in between.
    """
    evidence = Evidence(connection)
    since = evidence.since(cycle)
    heard = evidence.new_feedback(cycle, since)
    found = candidates(heard, evidence.new_failures(cycle, since))
    asked = evidence.asked(cycle.tenant_id, [each.run_id for each in found if each.correction])
    kept = distinct(found, asked)
    evidence.mark(cycle, _seen(found, heard))
    counts = Counter(each.category for each in found)
    return Mined(candidates=kept, counts={**counts, MERGED: len(found) - len(kept)})


def candidates(
    heard: Sequence[Heard], failures: Sequence[tuple[RunId, RunState]]
) -> list[Candidate]:
    """One candidate a run, by age (run ids sort by age). `heard` is in order of run and seq."""
    spoken = {
        run_id: judged(list(said)) for run_id, said in groupby(heard, key=lambda each: each.run_id)
    }
    silent = {
        run_id: Candidate(run_id=run_id, seq=0, category=Category(state.value))
        for run_id, state in failures
    }
    return [each for _, each in sorted({**silent, **spoken}.items())]


def judged(said: Sequence[Heard]) -> Candidate:
    """What one run's feedback amounts to: its last correction, else its last bad rating."""
    corrections = [each for each in said if each.correction is not None]
    if not corrections:
        return _candidate(said[-1], Category.DOWN_RATED)
    last = corrections[-1]
    right = last.answer is not None and last.answer == last.correction
    return _candidate(last, Category.CONFIRMED if right else Category.CORRECTED)


def _candidate(heard: Heard, category: Category) -> Candidate:
    return Candidate(
        run_id=heard.run_id,
        seq=heard.seq,
        category=category,
        correction=heard.correction,
        by=heard.by,
    )


def distinct(found: Sequence[Candidate], asked: Mapping[RunId, Asked]) -> list[Candidate]:
    """The candidates without near-duplicates; those without a correction are left as they are."""
    kept: dict[object, Candidate] = {}
    for each in found:
        known = each.correction is not None and each.run_id in asked
        key = _lesson(asked[each.run_id], each.correction) if known else each.run_id
        kept.setdefault(key, each)
    return list(kept.values())


def _lesson(asked: Asked, correction: Json) -> tuple[str, tuple[str, ...], str]:
    return message_of(asked.input), asked.files, json.dumps(correction, sort_keys=True)


def message_of(given: Mapping[str, Json]) -> str:
    """The longest text of an input, normalised: what a person wrote. All of it where none is."""
    texts = [value for value in given.values() if isinstance(value, str)]
    return normalised(max(texts, key=len)) if texts else json.dumps(dict(given), sort_keys=True)


def _seen(found: Sequence[Candidate], heard: Sequence[Heard]) -> list[Seen]:
    """All feedback that was looked at, and every candidate's run as such."""
    category = {each.run_id: each.category for each in found}
    said = [Seen(each.run_id, each.seq, category[each.run_id]) for each in heard]
    return said + [Seen(each.run_id, 0, each.category) for each in found]
