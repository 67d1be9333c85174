"""How much pruning adds to the noise a gradient has anyway: many real batches, with and without."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dppo.config import PruningConfig
from dppo.demo_tasks import Digits
from dppo.draws import MaskGenerator
from dppo.learning import Recipe, grpo_advantages, train
from dppo.prompts import PromptHistory, prune_prompts
from dppo.pruning import effective_sample_size, prune_completions


def gradient_variance(
    rates: Sequence[float], seed: int, *, batches: int = 200, prompts: int = 128, samples: int = 16, warm_up: int = 120
) -> dict[str, dict[str, float]]:
    """Ratio of total gradient variance, pruned over full, at a fixed policy of the digits task.

    The policy is trained for `warm_up` steps; one pass of groups fills the prompt history; then each batch gives the
    full gradient and, for each rate (used at both levels), a pruned one. The ratio compares tr Var over the batches.

    Returns:
        For each rate, as text: "variance_ratio", and "ess_share", the mean of (Σw)²/Σw² over the completions that are
        not free.
    """
    task = Digits()
    policy = task.policy(seed)
    recipe = Recipe("grpo", 0, 0, steps=warm_up, prompts=prompts, samples=samples, optimizer="sgd", lr=0.2, clip=None,
                    evaluate_every=warm_up)  # fmt: skip
    train(task, recipe, seed, policy)
    rng = torch.Generator().manual_seed(seed + 1)
    history = PromptHistory(task.n_prompts)
    for chunk in torch.arange(task.n_prompts).split(1000):
        rewards = task.rewards(chunk, task.sample(policy, chunk, samples, rng))
        history.update(chunk, grpo_advantages(rewards).abs().mean(1), 0)
    full: list[Tensor] = []
    pruned: dict[float, list[Tensor]] = {rate: [] for rate in rates}
    ess: dict[float, list[float]] = {rate: [] for rate in rates}
    parameters = list(policy.parameters())
    for number in range(batches):
        chosen = torch.randint(task.n_prompts, (prompts,), generator=rng)
        logits = policy(task.inputs[chosen])
        answers = torch.multinomial(logits.detach().softmax(-1), samples, replacement=True, generator=rng)
        advantages = grpo_advantages(task.rewards(chosen, answers[..., None])).flatten()

        def gradient(
            weight: Tensor, logits: Tensor = logits, answers: Tensor = answers, advantages: Tensor = advantages
        ) -> Tensor:
            return _gradient(parameters, logits, answers, weight * advantages)

        full.append(gradient(torch.ones_like(advantages)))
        for rate in rates:
            cfg, source = PruningConfig(rate, rate), MaskGenerator(seed, number)
            by_prompt = prune_prompts(chosen, history, cfg, source).weight.repeat_interleave(samples)
            result = prune_completions(advantages, samples, cfg, generator=source)
            weight = result.weight * by_prompt
            pruned[rate].append(gradient(weight))
            ess[rate].append(effective_sample_size(weight) / max(int((~result.free).sum()), 1))
    base = _total_variance(full)
    return {
        f"{rate:g}": {"variance_ratio": _total_variance(pruned[rate]) / base, "ess_share": sum(ess[rate]) / batches}
        for rate in rates
    }


def _gradient(parameters: Sequence[Tensor], logits: Tensor, answers: Tensor, signal: Tensor) -> Tensor:
    """Of −(1/Z) Σ w A log π, through its gradient in the logits: −(1/Z)(Σ_i w_i A_i 1[a_i] − π Σ_i w_i A_i)."""
    signal = signal.reshape(answers.shape)
    slope = torch.zeros_like(logits).scatter_add_(1, answers, signal)
    slope = slope - logits.detach().softmax(-1) * signal.sum(1, keepdim=True)
    found = torch.autograd.grad(logits, parameters, -slope / signal.numel(), retain_graph=True)
    return torch.cat([g.flatten() for g in found]).double()


def _total_variance(gradients: list[Tensor]) -> float:
    return float(torch.stack(gradients).var(0).sum())
