"""A small categorical policy with two tokens a completion, in double precision, for exact checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dppo.audit import LossFunction
from dppo.losses import Surrogate

VOCABULARY, HIDDEN, FEATURES = 5, 6, 4


class ToyBatch:
    """Prompts as feature vectors, completions of up to two tokens, an MLP policy; old and reference policies differ."""

    def __init__(self, rewards: Tensor, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        rng = torch.Generator().manual_seed(seed)
        groups, size = rewards.shape

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype)

        self.params = [
            (normal(HIDDEN, FEATURES) / 2).requires_grad_(),
            (normal(2 * VOCABULARY, HIDDEN) / 2).requires_grad_(),
        ]
        self.prompts = normal(groups, FEATURES).repeat_interleave(size, 0)
        self.tokens = torch.randint(VOCABULARY, (groups * size, 2), generator=rng)
        self.lengths = torch.randint(1, 3, (groups * size,), generator=rng)
        self.mask = (torch.arange(2) < self.lengths[:, None]).to(dtype)
        centred = rewards - rewards.mean(1, keepdim=True)
        self.advantages = (centred / (rewards.std(1, keepdim=True, correction=0) + 1e-6)).flatten().to(dtype)
        self.groups = size
        with torch.no_grad():
            self.old = self.logps([p + 0.4 * normal(*p.shape) for p in self.params])
            self.ref = self.logps([p + 0.4 * normal(*p.shape) for p in self.params])

    def logps(self, params: Sequence[Tensor]) -> Tensor:
        logits = (torch.tanh(self.prompts @ params[0].T) @ params[1].T).reshape(-1, 2, VOCABULARY)
        return logits.log_softmax(-1).gather(2, self.tokens[..., None]).squeeze(2)

    def batch(self, **more: object) -> dict:
        return {"advantages": self.advantages, "groups": self.groups, "lengths": self.lengths, **more}

    def loss_fn(self, surrogate: Surrogate, *, normalizer: str = "full") -> LossFunction:
        """A loss for the auditor; normalizer "kept" is the classic mistake."""

        def loss(params: Sequence[Tensor], batch: Mapping[str, Any], weight: Tensor) -> Tensor:
            kept = weight > 0
            z = surrogate.normalizer(self.mask if normalizer == "full" else self.mask[kept])
            return surrogate.loss(
                self.logps(params)[kept], self.advantages[kept], self.mask[kept],
                weight=weight[kept], normalizer=z, old_logps=self.old[kept], ref_logps=self.ref[kept],
            )  # fmt: skip

        return loss
