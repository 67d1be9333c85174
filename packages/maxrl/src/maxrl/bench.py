"""``maxrl bench``: each row measured in turns with the peer a user would take instead."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from icml26_shared.bench import Bench, BenchReport, Measured, Rule, compare, growth, peak_memory
from maxrl.advantages import maxrl_advantages
from maxrl.kernels import fused_policy_loss
from maxrl.objective import weight
from maxrl.rollouts import expected_rollouts, rollout_until_success

if TYPE_CHECKING:
    from icml26_shared.console import Context

ROWS, VOCABULARY, WIDTH = 1024, 49152, 576  # completion tokens of a micro-batch, SmolLM2's head


def arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``bench``."""
    parser.add_argument("--pairs", type=int, default=9, help="pairs of each comparison (default 9)")


def run(ctx: Context, args: argparse.Namespace) -> BenchReport:
    """All rows."""
    bench = Bench(ctx, libraries=["trl", "liger-kernel", "transformers"])
    _advantage_rows(bench, args.pairs)
    _loss_rows(bench, args.pairs)
    _dropping_rows(bench, args.pairs)
    _sequential_row(bench)
    return bench.report()


# -- advantages --------------------------------------------------------------------------------------------------------


def loop_advantages(rewards: Tensor, ids: list[str]) -> Tensor:
    """Advantages as trainers commonly compute them: rollouts collected in a dictionary, one at a time."""
    groups: dict[str, list[Tensor]] = defaultdict(list)
    for i in range(rewards.shape[0]):
        groups[ids[i]].append(rewards[i])
    means = {name: torch.mean(torch.tensor(values)) for name, values in groups.items()}
    out = rewards.clone()
    for i in range(rewards.shape[0]):
        out[i] = (rewards[i] - means[ids[i]]) / (means[ids[i]] + 1e-6)
    return out


def _advantage_rows(bench: Bench, pairs: int) -> None:
    rewards = (torch.rand(8192, generator=torch.Generator().manual_seed(0)) < 0.3).float()
    ids = [str(i // 16) for i in range(8192)]

    def measure() -> Measured:
        if not torch.allclose(
            maxrl_advantages(rewards, group_size=16, eps=1e-6), loop_advantages(rewards, ids), atol=1e-4
        ):
            raise RuntimeError("the two sides disagree")
        return Measured(
            compare(
                lambda: maxrl_advantages(rewards, group_size=16), lambda: loop_advantages(rewards, ids), pairs=pairs
            )
        )

    bench.row("advantages, B = 8192, groups of 16", measure, goal=Rule("ratio", ">=", 50), peer="loop over rollouts")

    def by_size(size: int) -> Callable[[], Tensor]:
        values = (torch.rand(size, generator=torch.Generator().manual_seed(1)) < 0.3).float()
        return lambda: maxrl_advantages(values, group_size=16)

    calls = {size: by_size(size) for size in (16384, 32768, 65536, 131072)}
    bench.row(
        "advantages against B", lambda: growth(lambda n: calls[n](), list(calls)), goal=Rule("exponent", "<=", 1.2)
    )


# -- fused loss --------------------------------------------------------------------------------------------------------


class Case:
    """Hidden states, head, targets and advantages; ``dead`` is the share of rows with advantage 0."""

    def __init__(self, rows: int = ROWS, vocabulary: int = VOCABULARY, dead: float = 0.0) -> None:
        g = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(rows, WIDTH, generator=g).requires_grad_()
        self.weight = (torch.randn(vocabulary, WIDTH, generator=g) / WIDTH**0.5).requires_grad_()
        self.targets = torch.randint(0, vocabulary, (rows,), generator=g)
        self.advantages = torch.randn(rows, generator=g)
        self.advantages[: int(dead * rows)] = 0

    def backward(self, loss: Tensor) -> float:
        """Take the gradients and drop them."""
        loss.backward()
        self.hidden.grad = self.weight.grad = None
        return float(loss.detach())

    def ours(self) -> float:
        """The fused loss."""
        return self.backward(fused_policy_loss(self.hidden, self.weight, self.targets, self.advantages).loss)

    def naive(self) -> float:
        """All logits, log_softmax, gather."""
        logits = self.hidden @ self.weight.T
        logp = torch.log_softmax(logits, -1).gather(1, self.targets[:, None]).squeeze(1)
        return self.backward(self.surrogate(logp))

    def surrogate(self, logp: Tensor) -> Tensor:
        """The clipped loss on policy, over the number of rows."""
        ratio = torch.exp(logp - logp.detach())
        a = self.advantages
        return -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).sum() / a.numel()

    def trl(self) -> float:
        """TRL's chunked head, then the loss."""
        from trl.kernels.chunked_logprob import ChunkedLogProbFunction

        logp = ChunkedLogProbFunction.apply(self.hidden, self.weight, None, self.targets, 1.0, 32768, None, 1.0, ())[0]
        return self.backward(self.surrogate(logp))

    def liger(self) -> float:
        """Liger's chunked GRPO loss: one sequence a row, no KL term, uncompiled as there may be no compiler."""
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

        loss_fn = LigerFusedLinearGRPOLoss(
            beta=0.0, loss_type="bnpo", use_ref_model=False, compiled=False, chunk_size=64
        )
        mask = torch.ones(self.targets.shape[0], 1)
        out = loss_fn(self.hidden[:, None], self.weight, self.targets[:, None], mask, self.advantages)
        return self.backward(out[0])


def _loss_rows(bench: Bench, pairs: int) -> None:
    size = f"({ROWS}, {VOCABULARY}, {WIDTH})"
    case = Case()

    def against(peer: Callable[[], float]) -> Callable[[], Measured]:
        def measure() -> Measured:
            ours, theirs = case.ours(), peer()
            if abs(ours - theirs) > 1e-5 * max(1.0, abs(theirs)):
                raise RuntimeError(f"the losses disagree: {ours} and {theirs}")
            mine, other = peak_memory(case.ours), peak_memory(peer)
            extra = {
                "memory ratio": other.rss_bytes / mine.rss_bytes,
                "memory ratio, torch's allocator": (other.torch_bytes or 0) / (mine.torch_bytes or 1),
                "peer peak [MiB]": other.rss_bytes / 2**20,
            }
            return Measured(compare(case.ours, peer, pairs=pairs, warmup=1), peak=mine, extra=extra)

        return measure

    goals = [Rule("ratio", ">=", 1 / 1.3), Rule("memory ratio", ">=", 5)]
    bench.row(f"fused loss {size}, float32", against(case.naive), goal=goals, peer="log_softmax of all logits")
    bench.row(f"fused loss {size} and TRL's head", against(case.trl), peer="TRL chunked log-probabilities")
    bench.row(f"fused loss {size} and Liger's", against(case.liger), peer="LigerFusedLinearGRPOLoss")

    def rows_growth() -> Any:
        cases = {rows: Case(rows, 8192) for rows in (256, 512, 1024, 2048)}
        return growth(lambda rows: cases[rows].ours(), list(cases))

    bench.row("fused loss against R, V = 8192", rows_growth, goal=Rule("exponent", "<=", 1.2))

    def memory_growth() -> dict[str, float]:
        small, large = Case(512, 16384), Case(2048, 65536)

        def beyond_gradients(c: Case) -> float:
            held = (c.hidden.numel() + c.weight.numel()) * 4
            return ((peak_memory(c.ours).torch_bytes or 0) - held) / 2**20

        a, b = beyond_gradients(small), beyond_gradients(large)
        return {"small [MiB]": a, "16 times the logits [MiB]": b, "growth": b / a}

    bench.row("memory of the fused loss beyond its gradients, R V x 16", memory_growth, goal=Rule("growth", "<=", 1.5))


def _dropping_rows(bench: Bench, pairs: int) -> None:
    for dead, goal in ((0.5, Rule("ratio", ">=", 1.7)), (0.75, ()), (0.9, ())):
        case = Case(dead=dead)

        def measure(case: Case = case) -> Measured:
            return Measured(compare(case.ours, case.naive, pairs=pairs, warmup=1))

        name = f"fused loss with {100 * dead:.0f} % of the rows at advantage 0"
        bench.row(name, measure, goal=goal, peer="log_softmax of all logits")
    for dead in (0.25, 0.5, 0.75):

        def measure_training(dead: float = dead) -> Measured:
            step = training_step(dead)
            found = compare(lambda: step(True), lambda: step(False), pairs=pairs, warmup=1)
            return Measured(found, extra={"1/(1-s)": 1 / (1 - dead)})

        bench.row(f"training part with {100 * dead:.0f} % dead rollouts dropped", measure_training, peer="keeping them")


def training_step(dead: float) -> Callable[[bool], float]:
    """Forward and backward of a small Llama on 32 rollouts of 64 tokens, with or without the dead ones."""
    from icml26_shared.tiny_models import tiny_llama

    model = tiny_llama(hidden_size=256, intermediate_size=512, num_hidden_layers=4, vocab_size=4096)
    ids = torch.randint(3, 4096, (32, 64), generator=torch.Generator().manual_seed(0))
    a = torch.ones(32)
    a[: int(dead * 32)] = 0

    def step(drop: bool) -> float:
        rows = a != 0 if drop else torch.ones(32, dtype=torch.bool)
        logits = model(ids[rows]).logits[:, :-1]
        logp = torch.log_softmax(logits, -1).gather(2, ids[rows][:, 1:, None]).squeeze(2)
        loss = -(a[rows, None] * logp).sum() / (32 * 63)
        loss.backward()
        model.zero_grad()
        return float(loss.detach())

    return step


# -- sequential rollouts -----------------------------------------------------------------------------------------------


def _sequential_row(bench: Bench) -> None:
    p, cap, prompts = 0.1, 128, 4000

    def measure() -> dict[str, float]:
        g = torch.Generator().manual_seed(0)
        batch = rollout_until_success(
            lambda asked: (torch.rand(len(asked), generator=g) < p).long().tolist(),
            lambda asked, drawn: drawn,
            list(range(prompts)),
            chunk=1,
            max_rollouts=cap,
        )
        used = batch.cost / prompts
        per_prompt = _gradients(batch.advantages(), batch.rewards, batch.group_ids, batch.n_drawn, p)
        # A fixed number of rollouts with the same total: its order is lower, so its error has a bias as well.
        n = round(used)
        rewards = (torch.rand(prompts * n, generator=g) < p).float()
        a = maxrl_advantages(rewards, group_size=n, estimator="conditional")
        ids = torch.arange(prompts).repeat_interleave(n)
        fixed = _gradients(a, rewards, ids, torch.full((prompts,), n), p)
        goal = weight(p, order=cap) * p * (1 - p)
        return {
            "rollouts used": used,
            "theory w_M(p)": expected_rollouts(p, cap),
            "share of a fixed 128": used / cap,
            "gradient MSE": float((per_prompt - goal).square().mean()),
            f"gradient MSE, fixed {n}": float((fixed - goal).square().mean()),
        }

    bench.row("sequential rollouts to order 128 at p = 0.1", measure, goal=Rule("share of a fixed 128", "<=", 0.1))


def _gradients(a: Tensor, rewards: Tensor, ids: Tensor, sizes: Tensor, p: float) -> Tensor:
    """Gradient estimate of each prompt in the one-logit model, S = r - p."""
    summed = torch.zeros(sizes.numel(), dtype=torch.float64).index_add_(0, ids, (a * (rewards - p)).double())
    return summed / sizes
