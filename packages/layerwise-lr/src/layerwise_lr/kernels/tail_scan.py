# mypy: disable-error-code="name-defined"
"""Power law fits of a sorted sample for every threshold at once.

With ``l_j = ln lambda_j`` ascending and threshold i, ``n_i = N - i``:

    alpha_i = 1 + n_i / sum_{j >= i} (l_j - l_i)
    D_i     = max_{j >= i} | 1 - exp((1 - alpha_i)(l_j - l_i)) - (j - i) / n_i |

O(N^2) work, done in tiles: no N x N array exists outside the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from icml26_shared.kernels import Path, choose_path, jit, launching_on, triton_language

tl = triton_language()

BLOCK_I, BLOCK_J, WARPS = 16, 128, 4
_ROWS = 64  # thresholds of one step on a CPU: the block stays in the cache


def tail_scan(logs: Tensor, *, prefer: Path | None = None) -> tuple[Tensor, Tensor]:
    """Exponent and distance for every threshold.

    Args:
        logs: natural logarithms of the eigenvalues, ascending, finite, float32 or float64 [N] or [batch, N].
        prefer: path, see `icml26_shared.kernels.choose_path`.

    Returns:
        ``alpha`` and ``D``, shaped and typed like ``logs``. Where all values from i on are equal (the last one always
        is) alpha is infinite and D is infinite.

    Raises:
        ValueError: another dtype or number of dimensions.
    """
    if logs.dim() not in (1, 2) or logs.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"tail_scan takes float32 or float64 [N] or [batch, N], got {logs.dtype} of shape {tuple(logs.shape)}"
        )
    path = choose_path(logs, prefer=prefer)
    rows = (logs if logs.dim() == 2 else logs[None]).contiguous()
    if path == "triton":
        alpha, distance = _scan_triton(rows)
    elif path == "cpu":
        alpha, distance = _scan_blocks(rows)
    else:
        alpha, distance = tail_scan_reference(rows)
    return (alpha, distance) if logs.dim() == 2 else (alpha[0], distance[0])


def tail_scan_reference(logs: Tensor) -> tuple[Tensor, Tensor]:
    """Plain torch with the whole [N, N] difference table of each row; [batch, N] in and out."""
    count = logs.shape[1]
    place = torch.arange(count, device=logs.device)
    above = place[None, :] >= place[:, None]
    n = (count - place).to(logs.dtype)
    difference = torch.where(above, logs[:, None, :] - logs[:, :, None], 0.0)
    total = difference.sum(-1)
    alpha = 1 + n / total
    model = 1 - torch.exp((1 - alpha)[:, :, None] * difference)
    empirical = (place[None, :] - place[:, None]).to(logs.dtype) / n[:, None]
    distance = torch.where(above, (model - empirical).abs(), 0.0).amax(-1) if count else total
    return alpha, torch.where(total > 0, distance, torch.inf)


def _scan_blocks(logs: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks of thresholds over the values above them."""
    batch, count = logs.shape
    alpha, distance = torch.empty_like(logs), torch.empty_like(logs)
    place = torch.arange(count, dtype=logs.dtype)
    for row in range(batch):
        values = logs[row]
        for start in range(0, count, _ROWS):
            stop = min(start + _ROWS, count)
            n = (count - place[start:stop])[:, None]
            table = values[None, start:] - values[start:stop, None]
            table[:, : stop - start].triu_()  # values below the threshold do not count
            total = table.sum(1, keepdim=True)
            found = 1 + n / total
            table.mul_(1 - found).nan_to_num_(nan=0.0).exp_().sub_(1)
            table.add_((place[None, start:] - place[start:stop, None]) / n)
            table[:, : stop - start].triu_()
            alpha[row, start:stop] = found[:, 0]
            distance[row, start:stop] = torch.where(total[:, 0] > 0, table.abs_().amax(1), torch.inf)
    return alpha, distance


def _scan_triton(logs: Tensor) -> tuple[Tensor, Tensor]:
    batch, count = logs.shape
    alpha, distance = torch.empty_like(logs), torch.empty_like(logs)
    if logs.numel():
        with launching_on(logs):
            tail_scan_kernel[((count + BLOCK_I - 1) // BLOCK_I, batch)](
                logs, alpha, distance, count, BLOCK_I=BLOCK_I, BLOCK_J=BLOCK_J, num_warps=WARPS
            )
    return alpha, distance


@jit
def tail_scan_kernel(logs_ptr, alpha_ptr, distance_ptr, count, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr):
    """BLOCK_I thresholds of one row: one pass for the sums, one for the largest deviation."""
    base = tl.program_id(1).to(tl.int64) * count
    first = tl.program_id(0) * BLOCK_I
    i = first + tl.arange(0, BLOCK_I)
    here = tl.load(logs_ptr + base + i, mask=i < count, other=0.0)
    total = tl.zeros((BLOCK_I,), dtype=here.dtype)
    for start in range(first, count, BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)
        there = tl.load(logs_ptr + base + j, mask=j < count, other=0.0)
        counts = (j[None, :] >= i[:, None]) & (j < count)[None, :]
        total += tl.sum(tl.where(counts, there[None, :] - here[:, None], 0.0), 1)
    n = (count - i).to(here.dtype)
    some = total > 0
    slope = tl.where(some, n / tl.where(some, total, 1.0), 0.0)
    largest = tl.zeros((BLOCK_I,), dtype=here.dtype)
    for start in range(first, count, BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)
        there = tl.load(logs_ptr + base + j, mask=j < count, other=0.0)
        counts = (j[None, :] >= i[:, None]) & (j < count)[None, :]
        difference = tl.where(counts, there[None, :] - here[:, None], 0.0)
        empirical = (j[None, :] - i[:, None]).to(here.dtype) / n[:, None]
        deviation = tl.abs(1.0 - tl.exp(-slope[:, None] * difference) - empirical)
        largest = tl.maximum(largest, tl.max(tl.where(counts, deviation, 0.0), 1))
    endless = float("inf")
    tl.store(alpha_ptr + base + i, tl.where(some, 1.0 + slope, endless), mask=i < count)
    tl.store(distance_ptr + base + i, tl.where(some, largest, endless), mask=i < count)
