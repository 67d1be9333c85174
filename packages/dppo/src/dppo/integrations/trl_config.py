"""The options of pruning and packing inside TRL's GRPOConfig."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dppo.config import PruningConfig
from icml26_shared.errors import require

require("trl", "dppo[trl]")
from trl import GRPOConfig  # noqa: E402 after the check that names the extra


@dataclass
class DynamicPruningConfig(GRPOConfig):
    """GRPOConfig with the options of pruning and packing.

    Args:
        prompt_rate, completion_rate, pruning_mode, anneal, resample_each_epoch, prune_score, min_keep_per_group,
            prune_budget: as of `dppo.PruningConfig` (its mode, score and budget). `anneal` counts optimizer steps.
            The prompt level always removes an exact number per block (design "fixed"): TRL's batches have a fixed size.
        free_zeros: remove rows of advantage exactly 0. None (default): wherever pruning is on. Switched off, with a
            warning, where a KL term gives such rows a gradient.
        history_threshold: τ anew for each pass ("epoch") or each batch ("batch").
        history_decay: ρ of the history's moving average, 0 for the last value.
        prompt_id_column: column with a stable id of each prompt; None hashes the prompt.
        pack: run old, reference and policy log-probabilities on packed rows instead of padded ones.
        pack_capacity: tokens of a packed row; None packs each micro-batch into one row.
        pack_window: look-ahead of the packer.
        share_prompts: store a prompt once for all its completions in a row.

    With both rates 0 (and free_zeros not set to True) training is TRL's own, bit for bit. With pruning on and
    `max_steps` unset, `num_train_epochs` counts passes over the prompts, so skipping prompts shortens the run; give
    `max_steps` if a learning rate schedule must reach its end.
    """

    prompt_rate: float = field(
        default=0.5, metadata={"help": "Probability with which a prompt of low history is skipped."}
    )
    completion_rate: float = field(
        default=0.5, metadata={"help": "Probability with which a low completion is skipped."}
    )
    pruning_mode: str = field(default="bernoulli", metadata={"help": "bernoulli, fixed, systematic or deterministic."})
    free_zeros: bool | None = field(default=None, metadata={"help": "Remove rows of advantage 0 for nothing."})
    anneal: float = field(default=1.0, metadata={"help": "Share of the steps that are pruned."})
    history_threshold: str = field(default="epoch", metadata={"help": "epoch or batch."})
    history_decay: float = field(default=0.0, metadata={"help": "Moving average of the history score."})
    resample_each_epoch: bool = field(default=True, metadata={"help": "A new mask for each inner iteration."})
    prune_score: str = field(default="abs_advantage", metadata={"help": "abs_advantage or abs_advantage_x_len."})
    prune_budget: str = field(default="items", metadata={"help": "items or tokens, for systematic."})
    min_keep_per_group: int = field(default=0, metadata={"help": "Completions kept of each group at least."})
    prompt_id_column: str | None = field(default=None, metadata={"help": "Column with a stable prompt id."})
    pack: bool = field(default=False, metadata={"help": "Packed instead of padded forward passes."})
    pack_capacity: int | None = field(default=None, metadata={"help": "Tokens of a packed row."})
    pack_window: int = field(default=64, metadata={"help": "Look-ahead of the packer."})
    share_prompts: bool = field(default=True, metadata={"help": "Store a prompt once for its completions."})

    def pruning(self) -> PruningConfig:
        """The options as a PruningConfig (free_zeros resolved without looking at the loss)."""
        on = self.prompt_rate > 0 or self.completion_rate > 0
        return PruningConfig(
            prompt_rate=self.prompt_rate, completion_rate=self.completion_rate, mode=_literal(self.pruning_mode),
            free_zeros=on if self.free_zeros is None else self.free_zeros, anneal=self.anneal,
            threshold=_literal(self.history_threshold), resample_each_epoch=self.resample_each_epoch,
            score=_literal(self.prune_score), min_keep_per_group=self.min_keep_per_group,
            budget=_literal(self.prune_budget),
        )  # fmt: skip


def _literal(value: str) -> Any:
    """A string option; PruningConfig checks it."""
    return value
