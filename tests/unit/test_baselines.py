"""The baselines beside a trained policy: certification's measures, on the report's own tasks."""

from dataclasses import replace

import pytest

from flywheel.evaluation.baselines import baselines
from runtime.checks.baselines import Latent, no_lookup
from runtime.domain import Domain
from runtime.run import Task


def drawn(domain: Domain, split: str, count: int, seed: int = 3) -> list[Task]:
    assert domain.source is not None
    return domain.source.generate(split=split, level="easy", count=count, seed=seed)


def test_on_few_tasks_the_best_guess_is_not_flattered(triage: Domain):
    """Counted on 64 tasks themselves nearly every situation is unique and its answer known; the
    certified bound is about what can be guessed before the tasks are seen."""
    source = triage.source
    assert isinstance(source, Latent)
    report = drawn(triage, "report", 64)
    rates = [baselines(triage, drawn(triage, "report", 64, seed), []).no_lookup for seed in (1, 2)]
    known = [rate for rate in rates if rate is not None]
    assert all(0.15 < rate <= 0.5 for rate in known)
    assert len(known) == 2
    found = baselines(triage, report, [])
    assert found.no_lookup is not None
    assert found.no_lookup < no_lookup(source, report)


def test_an_unseen_situation_is_a_wrong_guess(triage: Domain):
    source = triage.source
    assert isinstance(source, Latent)
    report = drawn(triage, "report", 20)
    assert no_lookup(source, report, counted_on=[]) == 0
    assert no_lookup(source, report, counted_on=report) == no_lookup(source, report)


def test_keywords_know_what_they_were_trained_on_and_little_else(triage: Domain):
    report, corrections = drawn(triage, "report", 64), drawn(triage, "practice", 96)
    itself = baselines(triage, corrections, corrections).keyword
    other = baselines(triage, report, corrections).keyword
    assert itself is not None
    assert other is not None
    assert other < 0.6 < itself


def test_imported_tasks_have_keywords_alone(triage: Domain):
    corrections = drawn(triage, "practice", 96)
    imported = [t.model_copy(update={"id": f"row {n}"}) for n, t in enumerate(corrections[:20])]
    found = baselines(triage, imported, corrections)
    assert found.no_lookup is None
    assert found.keyword == pytest.approx(1.0, abs=0.4)


def test_where_nothing_can_be_measured_nothing_is_claimed(triage: Domain):
    report = drawn(triage, "report", 8)
    assert baselines(triage, report, []).keyword is None
    for found in (
        baselines(triage, [], report),
        baselines(replace(triage, source=None), report, report),
    ):
        assert (found.no_lookup, found.keyword) == (None, None)
