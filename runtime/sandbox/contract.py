"""The contract of every sandbox back end, as cases that a test runner or `doctor` can call.

A case is an async function of a back end that raises `ContractBroken` where the back end does not
keep what the protocol promises. `needs` names the features it uses; a back end that lists one of
them in `unsupported` (fakes only) is excused. Sizes and times are small.
"""

from runtime.sandbox.contract_cases import Case, ContractBroken
from runtime.sandbox.contract_helper import AGAINST_THE_HELPER
from runtime.sandbox.contract_hostile import HOSTILE
from runtime.sandbox.contract_trees import TREES
from runtime.sandbox.contract_work import WORK

__all__ = ["CONTRACT", "Case", "ContractBroken"]

CONTRACT: list[Case] = [*WORK, *TREES, *HOSTILE, *AGAINST_THE_HELPER]
