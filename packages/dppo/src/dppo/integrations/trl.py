"""Dynamic pruning in TRL's GRPO trainer.

    trainer = DynamicPruningTrainer(model=..., reward_funcs=..., args=DynamicPruningConfig(...), train_dataset=...)

and, with any other subclass of GRPOTrainer, the mixin in front of it:

    class Trainer(DynamicPruningMixin, MaxRLTrainer): ...

Where the method sits: prompts are skipped by the sampler; completions after rewards and advantages of the full groups
are known and before old and reference log-probabilities are computed; weights are applied to the gradient of each row
of TRL's own loss, so ratio and clip see none of them; and the loss is rescaled from what was kept to the Z of the full
batch. The logged loss is that of the kept rows over the full Z: its gradient is the unbiased one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dppo.config import PruningConfig
from dppo.draws import MaskGenerator, combine
from dppo.integrations.transformers import attention_of, check_packable, packed_attention_of
from dppo.integrations.trl_batches import PackStats, assign, micro_batch, packed_log_probabilities
from dppo.integrations.trl_config import DynamicPruningConfig
from dppo.integrations.trl_sampler import COLUMN, Draw, DrawnDataset, PruningSampler, dataset_keys
from dppo.keys import prompt_key
from dppo.losses import LOSS_TYPES, SEQUENCE_LOSSES, scale_gradient
from dppo.prompts import PromptHistory
from dppo.pruning import PruneResult, prune_completions
from icml26_shared.checkpoint import load_state, save_state
from icml26_shared.errors import require

require("trl", "dppo[trl]")
from trl import GRPOTrainer  # noqa: E402 after the check that names the extra

# For type checkers the mixin has everything of the trainer it stands in front of.
_Host: Any = GRPOTrainer if TYPE_CHECKING else object

STATE_FILE = "dynamic_pruning.safetensors"
ROLLOUTS_FILE = "dynamic_pruning_rollouts_{}.safetensors"


class DynamicPruningMixin(_Host):
    """Puts pruning in front of any subclass of TRL's GRPOTrainer; its `args` must be a DynamicPruningConfig or have
    the same fields."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        missing = [name for name in ("prompt_rate", "completion_rate", "pack") if not hasattr(self.args, name)]
        if missing:
            raise TypeError(
                f"args is a {type(self.args).__name__} without {', '.join(missing)}; use DynamicPruningConfig, or a "
                "class that inherits from it and from the other trainer's config"
            )
        model = self.accelerator.unwrap_model(self.model)
        self._plain_attention: str = model.config.get_text_config()._attn_implementation
        self.pruning: PruningConfig = self._checked_pruning()
        self.history = PromptHistory(
            rate=self.pruning.prompt_rate, decay=self.args.history_decay, threshold=self.pruning.threshold
        )
        self.generation_count = 0
        self.pruning_sampler: PruningSampler | None = None
        self._row_weight: Tensor | None = None
        self._was_deferred: set[str] | None = None
        self._deferred: set[str] | None = None
        self._pack_stats = PackStats()

    @property
    def _active(self) -> bool:
        cfg = self.pruning
        return cfg.prompt_rate > 0 or cfg.completion_rate > 0 or cfg.free_zeros or self.args.pack

    def _checked_pruning(self) -> PruningConfig:
        args, cfg = self.args, self.args.pruning()
        on = cfg.prompt_rate > 0 or cfg.completion_rate > 0 or cfg.free_zeros
        if on:
            _check_loss(self, args)
        if cfg.prompt_rate > 0 and isinstance(self.train_dataset, torch.utils.data.IterableDataset):
            raise ValueError(
                "prompt_rate > 0 needs a map-style data set: a stream has no epoch order to replenish from; "
                "load it whole or set prompt_rate=0"
            )
        if args.pack:
            check_packable(self.accelerator.unwrap_model(self.model))
        if cfg.free_zeros and self.beta != 0.0:
            if args.free_zeros is True or cfg.completion_rate > 0:
                warnings.warn(
                    f"beta={self.beta}: rows of advantage 0 have a KL gradient, so free_zeros is switched off; they "
                    "are pruned at random like other low rows",
                    UserWarning,
                    stacklevel=3,
                )
            cfg = PruningConfig(**{**vars(cfg), "free_zeros": False})
        return cfg

    # --- prompts ---------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        if not self._active or isinstance(self.train_dataset, torch.utils.data.IterableDataset):
            return super().get_train_dataloader()  # type: ignore[misc]
        original = self.train_dataset
        self.train_dataset = DrawnDataset(original)
        try:
            return super().get_train_dataloader()  # type: ignore[misc]
        finally:
            self.train_dataset = original

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        dataset = self.train_dataset if dataset is None else dataset
        if not isinstance(dataset, DrawnDataset):
            return super()._get_train_sampler(dataset)  # type: ignore[misc]
        column = self.args.prompt_id_column
        rows = dataset.dataset
        texts = rows[column or "prompt"] if hasattr(rows, "column_names") else [r[column or "prompt"] for r in rows]
        keys = dataset_keys([str(t) if column else t for t in texts])
        self.history.check_dataset(keys)
        counts_passes = self.args.max_steps <= 0 and self.pruning.prompt_rate > 0
        self.pruning_sampler = PruningSampler(
            dataset, self.num_generations, self.args.generation_batch_size // self.num_generations,
            self.num_iterations * self.args.steps_per_generation, self.shuffle_dataset, self.args.seed,
            keys=keys, history=self.history, rate=self._prompt_rate, refresh=self.pruning.threshold,
            max_passes=self.args.num_train_epochs if counts_passes else None,
            default_length=float(self.max_completion_length),
        )  # fmt: skip
        return self.pruning_sampler

    def _prompt_rate(self) -> float:
        return self.pruning.prompt_rate if self.pruning.is_active(self._progress()) else 0.0

    def _progress(self) -> float:
        return self.state.global_step / self.state.max_steps if self.state.max_steps > 0 else 0.0

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()  # type: ignore[misc]
        if COLUMN not in self._signature_columns:
            self._signature_columns = [*self._signature_columns, COLUMN]

    # --- completions -----------------------------------------------------------------------------------------------

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        if not (self._active and self.model.training):
            return super()._prepare_inputs(generation_batch)  # type: ignore[misc]
        every = self.args.steps_per_generation * self.num_iterations
        if self._step % every == 0 or self._buffered_inputs is None:
            self._buffered_inputs = self._generate_and_prune(generation_batch)
        return self._buffered_inputs[self._step % every]

    def _generate_and_prune(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Micro-batches of all inner iterations on one batch of rollouts."""
        draws = [row.pop(COLUMN, None) or Draw(prompt_key(row["prompt"])) for row in rows]
        with self._defer_log_probabilities(), self._padded_attention():
            batch = self._generate_and_score_completions(rows)
        if "num_images" in batch or "pixel_values" in batch:
            raise ValueError("images are not supported with pruning: their tensors cannot be cut by row")
        shared = self._gather_batch(batch, draws)
        masks = self._masks(shared, len(rows))
        batch["prompts_share"] = torch.tensor(shared["prompts"] / shared["pulled"], device=self.accelerator.device)
        batch["num_items_in_batch"] = batch["num_items_in_batch"].new_tensor(shared["token_normalizer"])
        needed = torch.stack([mask.keep for mask in masks]).any(0)
        self._fill_log_probabilities(batch, needed)
        self._record_visits(shared)
        self._log_pruning(shared, masks[0])
        self.generation_count += 1
        return self._deal(batch, masks, shared["draw_weight"])

    def _deal(self, batch: dict[str, Any], masks: list[PruneResult], draw_weight: Tensor) -> list[dict[str, Any]]:
        """The micro-batches of all inner iterations, each with the same number of rows on every process."""
        steps = self.args.steps_per_generation
        chosen = [rows for mask in masks for rows in assign(batch, mask.keep, steps)]
        weights = [mask.weight.double() * draw_weight for mask in masks for _ in range(steps)]
        counts = torch.tensor([[len(rows) for rows in chosen]], device=self.accelerator.device)
        most = self.accelerator.gather(counts).amax(0).clamp(min=1).tolist()
        return [micro_batch(batch, *each) for each in zip(chosen, weights, most, strict=True)]

    def _gather_batch(self, batch: dict[str, Any], draws: list[Draw]) -> dict[str, Any]:
        """What decides the masks, from all processes and in the same order everywhere."""
        device = self.accelerator.device
        loss_mask = batch["completion_mask"] * batch.get("tool_mask", 1)
        advantages = batch["advantages"]
        if advantages.dim() > 1:  # per-token advantages of other subclasses
            advantages = (advantages.abs() * loss_mask).sum(1) / loss_mask.sum(1).clamp(min=1)
        table = torch.stack(
            [
                advantages.double(), loss_mask.sum(1).double(),
                torch.tensor([d.weight for d in draws], device=device).double(),
                torch.tensor([float(d.low) for d in draws], device=device).double(),
            ],
            1,
        )  # fmt: skip
        table = self.accelerator.gather(table)
        keys = self.accelerator.gather(torch.tensor([d.key for d in draws], device=device))
        size, prompts = len(table), len(table) // self.num_generations
        pulled = draws[0].pulled or prompts
        certain = table[:, 3] == 0
        low_tokens = draws[0].low_tokens * self.num_generations
        local = slice(self.accelerator.process_index * len(draws), (self.accelerator.process_index + 1) * len(draws))
        return {
            "advantages": table[:, 0].to(batch["advantages"].dtype), "lengths": table[:, 1].long(), "keys": keys,
            "draw_weight": table[local, 2], "prompts": prompts, "pulled": pulled, "local": local,
            "group": torch.arange(prompts, device=device).repeat_interleave(self.num_generations)[:size],
            "token_normalizer": max(float(table[certain, 1].sum()) + low_tokens, 1.0),
        }  # fmt: skip

    def _masks(self, shared: dict[str, Any], rows: int) -> list[PruneResult]:
        """The local part of one mask for each inner iteration."""
        place = torch.arange(len(shared["keys"]), device=shared["keys"].device) % self.num_generations
        ids = combine(shared["keys"], place)
        masks: list[PruneResult] = []
        for iteration in range(self.num_iterations):
            if iteration and not self.pruning.resample_each_epoch:
                masks.append(masks[0])
                continue
            generator = MaskGenerator(self.args.seed, self.generation_count, f"completions/{iteration}")
            whole = prune_completions(
                shared["advantages"], self.num_generations, self.pruning, generator=generator,
                lengths=shared["lengths"], sample_ids=ids, progress=self._progress(),
            )  # fmt: skip
            cut = shared["local"]
            if iteration == 0:
                shared["whole"] = whole
            masks.append(PruneResult(whole.keep[cut], whole.weight[cut], whole.prob[cut], whole.free[cut]))
        return masks

    def _record_visits(self, shared: dict[str, Any]) -> None:
        """H of each generated prompt, from its full group; the same on every process."""
        grouped = shared["advantages"].abs().double().reshape(-1, self.num_generations)
        lengths = shared["lengths"].double().reshape(-1, self.num_generations)
        keys = shared["keys"].reshape(-1, self.num_generations)[:, 0]
        self.history.update(keys.cpu(), grouped.mean(1).cpu(), self.generation_count, lengths=lengths.mean(1).cpu())

    def _log_pruning(self, shared: dict[str, Any], local: PruneResult) -> None:
        whole: PruneResult = shared["whole"]
        stats, kept = whole.stats, shared["prompts"]
        generated, updated = stats["tokens"], stats["tokens_kept"]
        full = generated * shared["pulled"] / kept
        spent = generated + 3 * updated
        for name, value in {
            "prompts_kept": kept / shared["pulled"], "completions_kept": stats["keep_fraction"],
            "tokens_generated": generated, "tokens_updated": updated, "tokens_skipped": full - updated,
            "ess": stats["ess"], "max_weight": stats["max_weight"],
            "speedup_tokens": 4 * full / spent if spent else 1.0,
        }.items():  # fmt: skip
            self._metrics["train"][f"dppo/{name}"].append(float(value))

    # --- log-probabilities -----------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        if not self.args.pack:
            return super().training_step(*args, **kwargs)  # type: ignore[misc]
        # Over the backward pass too: gradient checkpointing, TRL's default, runs the layers again there.
        with packed_attention_of(self.accelerator.unwrap_model(self.model)):
            return super().training_step(*args, **kwargs)  # type: ignore[misc]

    @contextmanager
    def _padded_attention(self) -> Iterator[None]:
        """For generation, which has a cache."""
        with attention_of(self.accelerator.unwrap_model(self.model), self._plain_attention):
            yield

    @contextmanager
    def _defer_log_probabilities(self) -> Iterator[None]:
        """While TRL generates, old and reference log-probabilities are not computed yet: only kept rows need them.

        Not where TRL uses them at once (vLLM's importance correction), nor where the reference is the model with its
        adapter off.
        """
        uses_now = self.use_vllm and self.vllm_importance_sampling_correction
        adapter_off = self.beta != 0.0 and self.ref_model is None
        self._deferred = None if uses_now or adapter_off else set()
        try:
            yield
        finally:
            self._was_deferred, self._deferred = self._deferred, None

    def _fill_log_probabilities(self, batch: dict[str, Any], needed: Tensor) -> None:
        """Computes the deferred ones for the rows that some inner iteration keeps."""
        if not self._was_deferred:
            return
        rows = torch.nonzero(needed).flatten()
        models = {"old_per_token_logps": self.model, "ref_per_token_logps": self.ref_model}
        for name, model in models.items():
            if name not in batch:
                continue
            values = torch.zeros(batch["completion_ids"].shape, device=rows.device)
            size = self.args.per_device_train_batch_size
            # Every process makes the same number of forward passes, so that sharded models stay in step.
            for number in range(self._most_of_all_processes(-(-len(rows) // size))):
                part = rows[number * size : (number + 1) * size]
                used = part if len(part) else torch.zeros(1, dtype=torch.long, device=rows.device)
                ids = torch.cat([batch["prompt_ids"][used], batch["completion_ids"][used]], 1)
                mask = torch.cat([batch["prompt_mask"][used], batch["completion_mask"][used]], 1)
                with torch.no_grad():
                    found, _, _ = self._get_per_token_logps_and_entropies(
                        model, ids, mask, batch["completion_ids"].shape[1]
                    )
                values[part] = found[: len(part)].float()
            batch[name] = values

    def _most_of_all_processes(self, count: int) -> int:
        return int(self.accelerator.gather(torch.tensor([count], device=self.accelerator.device)).max())

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, batch_size: int | None = None,
        compute_entropy: bool = False, compute_aux_loss: bool = False, **others: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        if self._deferred is not None and not torch.is_grad_enabled():
            self._deferred.add("ref" if model is self.ref_model else "old")
            return torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device), None, None
        if self.args.pack and not any(value is not None for value in others.values()):
            logps, entropies = packed_log_probabilities(
                model, input_ids, attention_mask, logits_to_keep, capacity=self.args.pack_capacity,
                window=self.args.pack_window, share_prompts=self.args.share_prompts, temperature=self.temperature,
                entropy=compute_entropy, autocast=self.accelerator.autocast, stats=self._pack_stats,
                config=self.accelerator.unwrap_model(model), most_rows=self._most_of_all_processes,
            )  # fmt: skip
            aux_loss = None
        else:
            logps, entropies, aux_loss = super()._get_per_token_logps_and_entropies(  # type: ignore[misc]
                model,
                input_ids,
                attention_mask,
                logits_to_keep,
                batch_size,
                compute_entropy,
                compute_aux_loss,
                **others,
            )
        if self._row_weight is not None and torch.is_grad_enabled():
            logps = scale_gradient(logps, self._row_weight)
        return logps, entropies, aux_loss

    # --- loss ------------------------------------------------------------------------------------------------------

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if "row_weight" not in inputs:
            return super()._compute_loss(model, inputs)  # type: ignore[misc]
        self._row_weight = inputs["row_weight"]
        try:
            loss = super()._compute_loss(model, inputs)  # type: ignore[misc]
        finally:
            self._row_weight = None
        if self.args.pack:
            self._metrics["train"]["dppo/density"].append(self._pack_stats.take())
        return loss * self._to_full_batch(inputs)

    def _to_full_batch(self, inputs: dict[str, Any]) -> float | Tensor:
        """From the normaliser TRL used for this micro-batch to the share of the full Z that a micro-batch has.

        grpo, dr_grpo: TRL divides by the rows it sees; the full batch has rows/steps of them a micro-batch, and Z also
        counts the prompts that were pulled and skipped. bnpo: the same with tokens. dapo, cispo: num_items_in_batch
        is the full one already.
        """
        steps = self.args.steps_per_generation
        if self.loss_type in SEQUENCE_LOSSES:
            full_rows = inputs["full_rows"] / steps
            return len(inputs["row_weight"]) / full_rows * inputs["prompts_share"]
        if self.loss_type == "bnpo":
            mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
            local = inputs["num_items_in_batch"] / self.accelerator.num_processes / steps
            return mask.sum().clamp(min=1) / local
        return 1.0

    # --- state -----------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self._active:  # first: a checkpoint is whole once it has its trainer_state.json, which comes last
            self._save_pruning_state(trial)
            self.accelerator.wait_for_everyone()
        super()._save_checkpoint(model, trial)  # type: ignore[misc]

    def _save_pruning_state(self, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        folder.mkdir(parents=True, exist_ok=True)
        if self.args.should_save:
            sampler = None if self.pruning_sampler is None else self.pruning_sampler.state_dict()
            save_state(folder / STATE_FILE, {"history": self.history.state_dict(), "sampler": sampler})
        # Each process keeps the rest of its rollouts, so that a checkpoint between generations resumes with them.
        every = self.args.steps_per_generation * self.num_iterations
        rest = self._buffered_inputs if self._step % every else None
        mine = {"step": self._step, "generations": self.generation_count, "micro_batches": rest}
        save_state(folder / ROLLOUTS_FILE.format(self.accelerator.process_index), mine)

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is None or not self._active:
            return
        path = Path(checkpoint) / STATE_FILE
        if not path.is_file():
            warnings.warn(
                f"{path} does not exist: the checkpoint was written without pruning; the prompt history starts empty",
                UserWarning,
                stacklevel=2,
            )
            return
        state = load_state(path)
        self.history.load_state_dict(state["history"])
        if self.pruning_sampler is not None and state["sampler"] is not None:
            self.history.check_dataset(self.pruning_sampler.keys)
            batches = self.pruning_sampler.blocks_per_iteration * self.pruning_sampler.repeat_count
            steps = max(1, -(-batches // self.args.gradient_accumulation_steps))
            self.pruning_sampler.load_state_dict(state["sampler"], replay=self.state.global_step % steps != 0)
        self._load_rollouts(Path(checkpoint))

    def _load_rollouts(self, checkpoint: Path) -> None:
        """This process's part; with more processes than before, process 0's counters, without rollouts."""
        path = checkpoint / ROLLOUTS_FILE.format(self.accelerator.process_index)
        known = path.is_file()
        mine = load_state(path if known else checkpoint / ROLLOUTS_FILE.format(0), device=self.accelerator.device)
        self.generation_count = int(mine["generations"])
        if known:
            self._step = int(mine["step"])
            self._buffered_inputs = mine["micro_batches"]


def _check_loss(trainer: Any, args: Any) -> None:
    """Refuses what is not additive over rows with a fixed normaliser."""
    if trainer.loss_type not in LOSS_TYPES:
        raise ValueError(
            f"loss_type={trainer.loss_type!r} is not supported with pruning; choose one of {', '.join(LOSS_TYPES)}"
        )
    refused = {
        "an entropy bonus (entropy_coef, use_adaptive_entropy)": trainer._entropy_bonus_enabled,
        "top_entropy_quantile < 1": trainer.top_entropy_quantile < 1.0,
        "a router auxiliary loss (set router_aux_loss_coef=0)": trainer.aux_loss_enabled,
    }
    for name, present in refused.items():
        if present:
            raise ValueError(
                f"{name} is not supported with pruning: it averages over what is kept, so it would be biased"
            )


class DynamicPruningTrainer(DynamicPruningMixin, GRPOTrainer):  # type: ignore[misc]
    """TRL's GRPOTrainer with dynamic pruning; the same constructor, `args` a DynamicPruningConfig."""


__all__ = ["DynamicPruningConfig", "DynamicPruningMixin", "DynamicPruningTrainer"]
