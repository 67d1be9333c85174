"""Two small tasks with verifiable answers, for the demo and the claims: real handwritten digits, and addition.

A task is a set of prompts, a policy made for it, and a verifier. Both policies are small enough that a training run
takes seconds to a minute on one core.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from icml26_shared.errors import require


class Digits:
    """digits-100: two of scikit-learn's 1797 handwritten digits side by side are one of 100 numbers.

    Training pairs are drawn from the first 1300 images of a fixed permutation, test pairs from the others. The policy
    is an MLP 128-256-100; its warm-up is one epoch of cross-entropy.
    """

    name = "digits-100"
    answer_length = 1

    def __init__(self, n_prompts: int = 8000, n_test: int = 2000) -> None:
        datasets = require("sklearn.datasets", "dppo[demo]")
        images, labels = datasets.load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(images))
        rng = np.random.default_rng(1)
        self.n_prompts = n_prompts
        self.inputs, self.labels = _pairs(images / 16.0, labels, order[:1300], n_prompts, rng)
        self.test_inputs, self.test_labels = _pairs(images / 16.0, labels, order[1300:], n_test, rng)

    def policy(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 100))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for batch in torch.randperm(self.n_prompts).split(128):
            loss = F.cross_entropy(net(self.inputs[batch]), self.labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return net

    def sample(self, policy: nn.Module, prompts: Tensor, size: int, rng: torch.Generator) -> Tensor:
        with torch.no_grad():
            probabilities = policy(self.inputs[prompts]).softmax(-1)
        return torch.multinomial(probabilities, size, replacement=True, generator=rng)[..., None]

    def rewards(self, prompts: Tensor, answers: Tensor) -> Tensor:
        return (answers[..., 0] == self.labels[prompts][:, None]).float()

    def logps(self, policy: nn.Module, prompts: Tensor, answers: Tensor) -> Tensor:
        unique, back = torch.unique(prompts, return_inverse=True)
        return policy(self.inputs[unique]).log_softmax(-1)[back].gather(1, answers)

    def accuracy(self, policy: nn.Module) -> float:
        with torch.no_grad():
            probabilities = policy(self.test_inputs).softmax(-1)
        return float(probabilities.gather(1, self.test_labels[:, None]).mean())


def _pairs(
    images: np.ndarray, labels: np.ndarray, pool: np.ndarray, n: int, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    first, second = pool[rng.integers(0, len(pool), n)], pool[rng.integers(0, len(pool), n)]
    inputs = np.concatenate([images[first], images[second]], 1)
    return torch.tensor(inputs, dtype=torch.float32), torch.tensor(10 * labels[first] + labels[second])


class Addition:
    """`BOS a a + b b =` and the three digits of the sum: p(right answer) is computed exactly by teacher forcing.

    The policy is a two-layer causal transformer of width 64; its warm-up is 800 supervised steps of 64 prompts out of
    all that are not for testing, which leaves it right about one time in eight. The prompts trained on are a part of
    those.
    """

    name = "addition"
    answer_length = 3
    PLUS, EQUALS, BOS, VOCABULARY = 10, 11, 12, 13

    def __init__(self, n_prompts: int = 1024, n_test: int = 1000, warm_up: int = 800) -> None:
        pairs = np.random.default_rng(0).permutation(10_000)
        self.n_prompts, self.warm_up = n_prompts, warm_up
        self.inputs, self.answers = self._encode(pairs[:n_prompts])
        self.warm_up_inputs, self.warm_up_answers = self._encode(pairs[:-n_test])
        self.test_inputs, self.test_answers = self._encode(pairs[-n_test:])

    def _encode(self, pairs: np.ndarray) -> tuple[Tensor, Tensor]:
        a, b = pairs // 100, pairs % 100
        bos, plus, equals = (np.full_like(a, token) for token in (self.BOS, self.PLUS, self.EQUALS))
        prompt = np.stack([bos, a // 10, a % 10, plus, b // 10, b % 10, equals], 1)
        total = a + b
        return torch.tensor(prompt), torch.tensor(np.stack([total // 100, total // 10 % 10, total % 10], 1))

    def policy(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        net = CausalTransformer(self.VOCABULARY, width=64, heads=4, layers=2, length=10)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        for _ in range(self.warm_up):
            batch = torch.randint(len(self.warm_up_inputs), (64,))
            loss = -self._logps(net, self.warm_up_inputs[batch], torch.arange(64), self.warm_up_answers[batch]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return net

    def sample(self, policy: Any, prompts: Tensor, size: int, rng: torch.Generator) -> Tensor:
        with torch.no_grad():
            logits, past = policy.extend(self.inputs[prompts])
            rows = torch.arange(len(prompts)).repeat_interleave(size)
            last, past = logits[rows, -1], _rows_of(past, rows)
            tokens: list[Tensor] = []
            while True:
                tokens.append(torch.multinomial(last.softmax(-1), 1, generator=rng))
                if len(tokens) == self.answer_length:
                    return torch.cat(tokens, 1).reshape(len(prompts), size, self.answer_length)
                logits, past = policy.extend(tokens[-1], past)
                last = logits[:, -1]

    def rewards(self, prompts: Tensor, answers: Tensor) -> Tensor:
        return (answers == self.answers[prompts][:, None]).all(-1).float()

    def logps(self, policy: nn.Module, prompts: Tensor, answers: Tensor) -> Tensor:
        unique, back = torch.unique(prompts, return_inverse=True)
        return self._logps(policy, self.inputs[unique], back, answers)

    def _logps(self, policy: Any, inputs: Tensor, rows: Tensor, answers: Tensor) -> Tensor:
        """Of the answers, to the prompts `inputs[rows]`: each prompt goes through the policy once."""
        logits, past = policy.extend(inputs)
        rest, _ = policy.extend(answers[:, :-1], _rows_of(past, rows))
        logits = torch.cat([logits[:, -1:].index_select(0, rows), rest], 1)
        return logits.log_softmax(-1).gather(2, answers[..., None]).squeeze(2)

    def accuracy(self, policy: nn.Module) -> float:
        with torch.no_grad():
            rows = torch.arange(len(self.test_inputs))
            return float(self._logps(policy, self.test_inputs, rows, self.test_answers).sum(1).exp().mean())


Past = list[tuple[Tensor, Tensor]]  # keys and values of each layer, (batch, heads, time, width of a head)


class CausalTransformer(nn.Module):
    """Pre-norm decoder with learned positions."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Int64[Tensor, "batch time"]) -> Float[Tensor, "batch time vocabulary"]:
        return self.extend(ids)[0]

    def extend(
        self, ids: Int64[Tensor, "batch time"], past: Past | None = None
    ) -> tuple[Float[Tensor, "batch time vocabulary"], Past]:
        """Logits of tokens that come after `past`, and the keys and values of all tokens so far, differentiable."""
        start = 0 if past is None else past[0][0].shape[2]
        x, found = self.tokens(ids) + self.positions[start : start + ids.shape[1]], []
        for number, block in enumerate(self.blocks):
            x, seen = block(x, None if past is None else past[number])
            found.append(seen)
        return self.head(self.norm(x)), found


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        batch, time, width = x.shape
        q, k, v = (
            part.reshape(batch, time, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).split(width, -1)
        )
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
        if time > 1:
            seen = k.shape[2] - time
            mask = torch.ones(time, seen + time, dtype=torch.bool, device=x.device).triu(seen + 1)
            scores = scores.masked_fill(mask, float("-inf"))
        mixed = scores.softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp(self.norm_2(x)), (k, v)


def _rows_of(past: Past, rows: Int64[Tensor, " rows"]) -> Past:
    return [(k.index_select(0, rows), v.index_select(0, rows)) for k, v in past]


TASKS: dict[str, type[Digits] | type[Addition]] = {"digits": Digits, "addition": Addition}
