"""``VERL_USE_EXTERNAL_MODULES=maxrl.verl``: see :mod:`maxrl.integrations.verl`."""

from maxrl.integrations.verl import ESTIMATORS, outcome_advantages

__all__ = ["ESTIMATORS", "outcome_advantages"]
