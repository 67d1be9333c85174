"""The policy loss in chunks of rows: the path of the CPU, and of GPUs without Triton.

A chunk of c rows needs its own logits only, c V <= 2**22 of them, in one buffer that is turned in place from logits
into probabilities into the gradient of the logits. The slope of a row's loss is known as soon as its log-probability
is, so the gradients are taken in the same pass: 6 R V D floating point operations like the unfused loss, where
recomputing the logits in the backward would take 8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from maxrl.kernels.policy_loss_rows import LossSettings, Rows, row_loss, transform_logits

LOGITS_AT_ONCE = 2**22
_VOCABULARY_TILE = 8192


@dataclass(frozen=True)
class Needs:
    """Which gradients are wanted."""

    hidden: bool
    weight: bool
    bias: bool

    @property
    def any(self) -> bool:
        return self.hidden or self.weight or self.bias


@dataclass
class ChunkedResult:
    """Loss, per-row results, and the gradients for an incoming gradient of 1 (None where not wanted)."""

    loss: Tensor
    logp: Tensor
    entropy: Tensor | None
    clipped: Tensor
    grad_hidden: Tensor | None = None
    grad_weight: Tensor | None = None
    grad_bias: Tensor | None = None

    @property
    def wants_gradients(self) -> bool:
        return self.grad_hidden is not None or self.grad_weight is not None or self.grad_bias is not None


def chunked_policy_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows, settings: LossSettings, needs: Needs
) -> ChunkedResult:
    """Loss and gradients. Extra memory: one buffer of at most max(2**22, V) numbers (two with a soft-cap; for 16-bit
    inputs as many bytes hold twice the rows, plus a tile in float32), and the gradients themselves, accumulated in
    float32 (float64 for float64 inputs)."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    count, device = hidden.shape[0], hidden.device

    def accumulator(like: Tensor, wanted: bool) -> Tensor | None:
        return torch.zeros(like.shape, dtype=dtype, device=device) if wanted else None

    result = ChunkedResult(
        loss=torch.zeros((), dtype=dtype, device=device),
        logp=torch.empty(count, dtype=dtype, device=device),
        entropy=torch.empty(count, dtype=dtype, device=device) if settings.entropy else None,
        clipped=torch.empty(count, dtype=torch.bool, device=device),
        grad_hidden=accumulator(hidden, needs.hidden),
        grad_weight=accumulator(weight, needs.weight),
        grad_bias=accumulator(bias, needs.bias) if bias is not None else None,
    )
    wide = hidden.dtype == dtype
    size = max(1, min(count, (LOGITS_AT_ONCE if wide else 2 * LOGITS_AT_ONCE) // weight.shape[0]))
    buffer = torch.empty(size, weight.shape[0], dtype=hidden.dtype, device=device)
    one_chunk = _one_chunk if wide else _one_chunk_16bit
    for chunk in _chunks(count, size):
        logits = buffer[: chunk.stop - chunk.start]
        one_chunk(logits, chunk, hidden[chunk], weight, bias, rows[chunk], settings, result)
    return result


def _chunks(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def _one_chunk(
    logits: Tensor,
    chunk: slice,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: Rows,
    settings: LossSettings,
    result: ChunkedResult,
) -> None:
    cap_slope = _logits_into(logits, hidden, weight, bias, settings)
    target = logits.gather(1, rows.targets.unsqueeze(1)).squeeze(1)
    top = logits.amax(1)
    weights = logits.sub_(top.unsqueeze(1)).exp_()
    total = weights.sum(1)
    logp = target - top - total.log()
    if result.entropy is not None:
        result.entropy[chunk] = torch.special.entr(weights / total.unsqueeze(1)).sum(1)
    slope = _record(chunk, logp, rows, settings, result)
    if not result.wants_gradients:
        return
    # d logp / d logits = 1[v = target] - softmax. What is the same along a row (slope, total, scale) is left to the
    # products, where it costs D numbers a row and not V.
    grad = weights.scatter_add_(1, rows.targets.unsqueeze(1), -total.unsqueeze(1))
    if cap_slope is not None:
        grad.mul_(cap_slope)
    factor = slope / total * (-settings.logit_scale / settings.temperature)
    _gradients(grad, factor, chunk, hidden, weight, result)


def _record(chunk: slice, logp: Tensor, rows: Rows, settings: LossSettings, result: ChunkedResult) -> Tensor:
    """Write the chunk's results; returns the slope of the weighted loss of each row by its log-probability."""
    loss = row_loss(logp, rows, settings)
    result.logp[chunk] = logp
    result.loss += (loss.loss * rows.weights).sum()
    result.clipped[chunk] = loss.clipped
    return loss.slope * rows.weights


def _logits_into(
    logits: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, settings: LossSettings
) -> Tensor | None:
    """Fill ``logits`` with the transformed logits; returns the derivative of the soft-cap when there is one."""
    torch.mm(hidden, weight.T, out=logits)
    if bias is not None:
        logits.add_(bias)
    if settings.logit_scale != 1.0:
        logits.mul_(settings.logit_scale)
    cap_slope = None
    if settings.softcap is not None:
        logits.div_(settings.softcap).tanh_()
        cap_slope = 1 - logits * logits
        logits.mul_(settings.softcap)
    if settings.temperature != 1.0:
        logits.div_(settings.temperature)
    return cap_slope


def _one_chunk_16bit(
    raw: Tensor,
    chunk: slice,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: Rows,
    settings: LossSettings,
    result: ChunkedResult,
) -> None:
    """Like :func:`_one_chunk` with the logits kept in 16 bits and everything else in float32, a tile at a time. The
    products are in 16 bits on a GPU and in float32 on a CPU, where few have fast ones of 16 bits (60 times slower than
    float32 where there are none)."""
    tiles = list(_chunks(weight.shape[0], _VOCABULARY_TILE))
    if raw.is_cpu:
        wide = hidden.float()
        for tile in tiles:
            raw[:, tile] = torch.mm(wide, weight[tile].float().T)
    else:
        torch.mm(hidden, weight.T, out=raw)
    count = raw.shape[0]
    top = torch.full((count,), -torch.inf, device=raw.device)
    for tile in tiles:
        top = torch.maximum(top, _tile_logits(raw, bias, tile, settings).amax(1))
    total, moment = torch.zeros_like(top), torch.zeros_like(top)
    for tile in tiles:
        shifted = _tile_logits(raw, bias, tile, settings) - top.unsqueeze(1)
        weights = shifted.exp()
        total += weights.sum(1)
        if settings.entropy:
            moment += (weights * shifted).sum(1)
    column = rows.targets.unsqueeze(1)
    target_bias = None if bias is None else bias.float()[rows.targets]
    target = transform_logits(raw.gather(1, column).squeeze(1).float(), target_bias, settings)
    log_total = top + total.log()
    if result.entropy is not None:
        result.entropy[chunk] = total.log() - moment / total
    slope = _record(chunk, target - log_total, rows, settings, result)
    if not result.wants_gradients:
        return
    for tile in tiles:
        logits = _tile_logits(raw, bias, tile, settings)
        grad = (logits - log_total.unsqueeze(1)).exp_()
        inside = (rows.targets >= tile.start) & (rows.targets < tile.stop)
        grad[inside, rows.targets[inside] - tile.start] -= 1
        if settings.softcap is not None:
            grad.mul_(1 - (logits * settings.temperature / settings.softcap) ** 2)
        raw[:, tile] = grad
    # The slopes, with their 1/Z, would push most of these numbers below the smallest of float16: they join later.
    _gradients(raw, slope * (-settings.logit_scale / settings.temperature), chunk, hidden, weight, result)


def _tile_logits(raw: Tensor, bias: Tensor | None, tile: slice, settings: LossSettings) -> Tensor:
    return transform_logits(raw[:, tile].float(), None if bias is None else bias[tile].float(), settings)


def _gradients(
    grad: Tensor, factor: Tensor, chunk: slice, hidden: Tensor, weight: Tensor, result: ChunkedResult
) -> None:
    """Add the products of the gradient by the logits, ``factor`` (rows,) times ``grad`` (rows, V)."""
    active = factor != 0
    whole = bool(active.all())
    if not whole:  # clipped rows have no gradient: leave them out of the products
        grad, hidden, factor = grad[active], hidden[active], factor[active]
    if grad.shape[0] == 0:
        return
    if result.grad_bias is not None:
        for tile in _chunks(weight.shape[0], _VOCABULARY_TILE):
            result.grad_bias[tile] += factor @ grad[:, tile].to(factor.dtype)
    if result.grad_hidden is not None:
        part = _by_hidden(grad, weight).to(factor.dtype).mul_(factor.unsqueeze(1))
        if whole:
            result.grad_hidden[chunk] = part
        else:
            result.grad_hidden[chunk][active] = part
    if result.grad_weight is not None:
        if grad.dtype == result.grad_weight.dtype:
            result.grad_weight.addmm_(grad.T, hidden * factor.unsqueeze(1))
            return
        if grad.is_cpu:
            wide = hidden.float() * factor.unsqueeze(1)
            for tile in _chunks(weight.shape[0], _VOCABULARY_TILE):
                result.grad_weight[tile].addmm_(grad[:, tile].float().T, wide)
            return
        largest = factor.abs().max()
        scaled = (hidden * (factor / largest).unsqueeze(1)).to(grad.dtype)
        for tile in _chunks(weight.shape[0], _VOCABULARY_TILE):
            result.grad_weight[tile] += torch.mm(grad[:, tile].T, scaled).to(factor.dtype).mul_(largest)


def _by_hidden(grad: Tensor, weight: Tensor) -> Tensor:
    if not grad.is_cpu or grad.dtype not in (torch.bfloat16, torch.float16):
        return torch.mm(grad, weight)
    total = torch.zeros(grad.shape[0], weight.shape[1])
    for tile in _chunks(weight.shape[0], _VOCABULARY_TILE):
        total.addmm_(grad[:, tile].float(), weight[tile].float())
    return total
