"""What simpler means than a trained policy would score on the very tasks it is judged on.

The measures are certification's (`runtime/checks/baselines.py`), pointed at report tasks: the best
answer to each situation that the message alone can show, and a classifier on the words of the same
corrections the policy learnt from. Pure and seeded, a fraction of a second on one core.
"""

from collections.abc import Sequence

from runtime.checks.baselines import Latent, keyword, no_lookup
from runtime.domain import Domain
from runtime.errors import InputError
from runtime.run import Record, Task

POPULATION = 2_000
"""Tasks on which the best answer to each situation is counted."""


class BaselineRates(Record):
    """Shares right in [0, 1]; None where the domain's tasks do not say."""

    no_lookup: float | None = None
    keyword: float | None = None


def baselines(
    domain: Domain, report: Sequence[Task], corrections: Sequence[Task], *, seed: int = 0
) -> BaselineRates:
    """Both baselines on the `report` tasks; `corrections` are the practice tasks with their gold.

    Only domains whose source tells what its generator drew have them, and `no_lookup` only on
    tasks that it drew (imported ones have keyword alone).
    """
    source = domain.source
    if not isinstance(source, Latent) or not report:
        return BaselineRates()
    return BaselineRates(
        no_lookup=_no_lookup(source, report, seed),
        keyword=keyword(corrections, report, source.decisive) if corrections else None,
    )


def _no_lookup(source: Latent, report: Sequence[Task], seed: int) -> float | None:
    """Counted on a large sample of the same split and level: on the few report tasks alone, nearly
    every situation would occur once and its answer be known."""
    split, level = report[0].split, report[0].level
    try:
        population = source.generate(split=split, level=level, count=POPULATION, seed=seed)
        return no_lookup(source, report, counted_on=population)
    except InputError:  # not a task of the generator's
        return None
