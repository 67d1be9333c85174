"""Per-image gradients of the digits perceptron under several estimators, against the image's pass rate."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from maxrl.advantages import maxrl_advantages
from maxrl.eval import digits

IMAGES, ROLLOUTS = 512, 4096


def gradient_profile(seed: int) -> dict[str, float]:
    """Rank correlations of gradient norm and pass rate, and the cosine of MaxRL's and cross-entropy's mean gradients,
    for a model after the first two of twenty epochs of cross-entropy: by then some images are easy and some are still
    hard."""
    model = digits.train(digits.Run("cross_entropy"), seed, stop=2)
    data = digits.number_images(IMAGES, seed=10**6 + seed)
    with torch.no_grad():
        hidden = torch.relu(model[0](data.inputs))
        log_probs = torch.log_softmax(model[2](hidden), -1)
    p = log_probs.exp().gather(1, data.labels[:, None]).squeeze(1)
    out: dict[str, float] = {}
    means = {}
    for name in ("maxrl", "cross-entropy", "grpo"):
        by_logits = _logit_gradients(name, log_probs, data.labels, seed)
        norms, means[name] = _norms_and_mean(model, data.inputs, hidden, by_logits)
        if name == "grpo":
            easy = p > 0.5
            out["rank correlation of norm and p, grpo above p = 0.5"] = _spearman(norms[easy], p[easy])
            out["images with p above 0.5"] = float(easy.sum())
        out[f"rank correlation of norm and p, {name}"] = _spearman(norms, p)
    cosine = torch.nn.functional.cosine_similarity(means["maxrl"], means["cross-entropy"], dim=0)
    return {**out, "cosine of the mean gradients, maxrl and cross-entropy": float(cosine)}


def _logit_gradients(name: str, log_probs: Tensor, labels: Tensor, seed: int) -> Tensor:
    """Ascent direction by the logits of each image, (images, classes); N = 4096 rollouts for the estimators."""
    policy = log_probs.exp()
    if name == "cross-entropy":
        return torch.nn.functional.one_hot(labels, policy.shape[1]) - policy
    generator = torch.Generator().manual_seed(seed)
    actions = torch.multinomial(policy, ROLLOUTS, replacement=True, generator=generator)
    a = maxrl_advantages((actions == labels[:, None]).flatten(), group_size=ROLLOUTS, estimator=name).view(
        actions.shape
    )
    summed = torch.zeros_like(policy).scatter_add_(1, actions, a)
    return (summed - a.sum(1, keepdim=True) * policy) / ROLLOUTS


def _norms_and_mean(
    model: torch.nn.Sequential, inputs: Tensor, hidden: Tensor, by_logits: Tensor
) -> tuple[Tensor, Tensor]:
    """Norm of each image's gradient by all weights, and the mean gradient as one vector."""
    by_hidden = (by_logits @ cast(torch.nn.Linear, model[2]).weight.detach()) * (hidden > 0)
    norms = torch.sqrt(
        by_logits.square().sum(1) * (hidden.square().sum(1) + 1)
        + by_hidden.square().sum(1) * (inputs.square().sum(1) + 1)
    )
    parts = (by_logits.T @ hidden, by_logits.sum(0), by_hidden.T @ inputs, by_hidden.sum(0))
    return norms, torch.cat([part.flatten() for part in parts]) / inputs.shape[0]


def _spearman(a: Tensor, b: Tensor) -> float:
    ranks = [x.argsort().argsort().double() for x in (a, b)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])
