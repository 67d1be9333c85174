"""Short name of :mod:`maxrl.integrations.trl`."""

from maxrl.integrations.trl import MaxRLArguments, MaxRLConfig, MaxRLMixin, MaxRLTrainer, patch

__all__ = ["MaxRLArguments", "MaxRLConfig", "MaxRLMixin", "MaxRLTrainer", "patch"]
