"""digits-100 and digits-1000: real handwritten digits side by side, the number they form is the class.

A mirror of the paper's ImageNet experiment (App. D) on scikit-learn's ``load_digits``: a sampled class is a rollout,
the right class a success, and the initial pass rate is 1/100 or 1/1000. The exact likelihood p(x) of the right class
is at hand, so NLL and pass@k have no sampling noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from icml26_shared.errors import require
from maxrl.advantages import maxrl_advantages
from maxrl.baselines import differential_smoothing

TRAIN_IMAGES = 1300


@dataclass(frozen=True)
class Digits:
    """``inputs`` (n, 64 places) float32 in [0, 1] and ``labels`` (n,) int64."""

    inputs: Tensor
    labels: Tensor


@lru_cache(maxsize=1)
def _images() -> tuple[Tensor, Tensor]:
    datasets = require("sklearn.datasets", "demo")
    raw = datasets.load_digits()
    order = torch.randperm(len(raw.target), generator=torch.Generator().manual_seed(0))
    pixels = torch.tensor(raw.data, dtype=torch.float32) / 16
    return pixels[order], torch.tensor(raw.target)[order]


def number_images(count: int, *, places: int = 2, split: str = "train", seed: int = 0) -> Digits:
    """``count`` random numbers of ``places`` digits, from the first 1300 images (train) or the other 497 (test)."""
    if split not in ("train", "test"):
        raise ValueError(f"split = {split!r}: choose 'train' or 'test'")
    pixels, targets = _images()
    pool = slice(0, TRAIN_IMAGES) if split == "train" else slice(TRAIN_IMAGES, None)
    pixels, targets = pixels[pool], targets[pool]
    picks = torch.randint(0, len(targets), (count, places), generator=torch.Generator().manual_seed(seed))
    powers = 10 ** torch.arange(places - 1, -1, -1)
    return Digits(pixels[picks].flatten(1), (targets[picks] * powers).sum(1))


@dataclass(frozen=True)
class Run:
    """How to train: ``estimator`` (and ``order``) of ``maxrl_advantages`` with ``rollouts`` per image, or
    ``"cross_entropy"``. ``entropy_bonus`` weighs the policy's entropy in the objective, ``smoothing`` is the gamma of
    differential smoothing."""

    estimator: str
    rollouts: int = 0
    lr: float = 0.1
    places: int = 2
    epochs: int = 20
    examples: int = 8000
    hidden: int = 256
    batch: int = 128
    order: int | None = None
    entropy_bonus: float = 0.0
    smoothing: float = 0.0


def make_model(run: Run, seed: int) -> nn.Sequential:
    """The perceptron of ``run`` with the weights of ``seed``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(64 * run.places, run.hidden), nn.ReLU(), nn.Linear(run.hidden, 10**run.places))


def policy_loss(logits: Tensor, labels: Tensor, run: Run, generator: torch.Generator) -> Tensor:
    """Loss whose gradient is minus the estimate of the run's objective, mean over the batch."""
    log_probs = torch.log_softmax(logits, -1)
    if run.estimator == "cross_entropy":
        return torch.nn.functional.nll_loss(log_probs, labels)
    actions = torch.multinomial(log_probs.detach().exp(), run.rollouts, replacement=True, generator=generator)
    rewards = (actions == labels[:, None]).flatten()
    a = maxrl_advantages(rewards, group_size=run.rollouts, estimator=run.estimator, order=run.order)
    chosen = log_probs.gather(1, actions)
    if run.smoothing:
        a = a + differential_smoothing(rewards, chosen.flatten(), run.smoothing)
    loss = -(a.view(actions.shape) * chosen).mean()
    if run.entropy_bonus:
        loss = loss + run.entropy_bonus * (log_probs.exp() * log_probs).sum(-1).mean()
    return loss


def exact_metrics(model: nn.Module, data: Digits, ks: tuple[int, ...] = (1, 128)) -> dict[str, float]:
    """``nll`` in nats and ``pass@k`` from the exact likelihoods, means over ``data``."""
    with torch.no_grad():
        log_p = torch.log_softmax(model(data.inputs), -1).gather(1, data.labels[:, None]).squeeze(1).double()
    p = log_p.exp()
    return {"nll": float(-log_p.mean()), **{f"pass@{k}": float(-torch.expm1(k * torch.log1p(-p)).mean()) for k in ks}}


def train(
    run: Run,
    seed: int,
    *,
    step: Callable[[int, int], None] | None = None,
    epoch: Callable[[nn.Module], None] | None = None,
    stop: int | None = None,
) -> nn.Sequential:
    """SGD with momentum 0.9, one epoch of linear warm-up, then a cosine to 0 (paper, App. D); ``step(done, of)`` and
    ``epoch(model)`` are called as the run goes on; ``stop`` ends it after that many epochs of its schedule. The same
    run and seed give the same model."""
    model = make_model(run, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=run.lr, momentum=0.9)
    per_epoch = run.examples // run.batch
    total = per_epoch * run.epochs
    generator = torch.Generator().manual_seed(seed + 1_000_003)
    done = 0
    for number in range(run.epochs if stop is None else stop):
        # Fresh pairs each epoch: images recur, pairs hardly do.
        data = number_images(run.examples, places=run.places, seed=seed * 1000 + number)
        order = torch.randperm(run.examples, generator=generator)
        for rows in order[: per_epoch * run.batch].view(per_epoch, run.batch):
            warm = min(1.0, (done + 1) / per_epoch)
            progress = max(0.0, (done - per_epoch) / max(1, total - per_epoch))
            cosine = 0.5 * (1 + torch.cos(torch.tensor(torch.pi * progress))).item()
            optimizer.param_groups[0]["lr"] = run.lr * warm * cosine
            loss = policy_loss(model(data.inputs[rows]), data.labels[rows], run, generator)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
            if step is not None:
                step(done, total)
        if epoch is not None:
            epoch(model)
    return model
