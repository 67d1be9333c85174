"""Maximum-likelihood RL (MaxRL): pass/fail training that ascends the log-likelihood of success."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from maxrl.advantages import maxrl_advantages as maxrl_advantages
    from maxrl.coverage import PassAtKCurve as PassAtKCurve
    from maxrl.coverage import pass_at_k as pass_at_k
    from maxrl.estimators import effective_order as effective_order
    from maxrl.integrations.trl import MaxRLConfig as MaxRLConfig
    from maxrl.integrations.trl import MaxRLTrainer as MaxRLTrainer
    from maxrl.kernels import fused_policy_loss as fused_policy_loss
    from maxrl.objective import weight as weight
    from maxrl.rollouts import rollout_until_success as rollout_until_success

__version__ = "0.1.0"

_HOME = {
    "maxrl_advantages": "maxrl.advantages",
    "weight": "maxrl.objective",
    "effective_order": "maxrl.estimators",
    "MaxRLTrainer": "maxrl.integrations.trl",
    "MaxRLConfig": "maxrl.integrations.trl",
    "fused_policy_loss": "maxrl.kernels",
    "rollout_until_success": "maxrl.rollouts",
    "pass_at_k": "maxrl.coverage",
    "PassAtKCurve": "maxrl.coverage",
}
__all__ = [
    "MaxRLConfig",
    "MaxRLTrainer",
    "__version__",
    "effective_order",
    "fused_policy_loss",
    "maxrl_advantages",
    "pass_at_k",
    "rollout_until_success",
    "weight",
]  # and PassAtKCurve, which goes with pass_at_k


def __getattr__(name: str) -> object:
    # Public names load on first use, so that `import maxrl` needs neither torch nor a trainer.
    if name not in _HOME:
        raise AttributeError(f"module 'maxrl' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*_HOME, "__version__"])
