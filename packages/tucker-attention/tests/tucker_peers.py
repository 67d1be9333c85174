"""Attention written out, to compare with."""

from __future__ import annotations

import math

import torch


def random_matrices(d, heads, groups, width=None, seed=0, dtype=torch.float64):
    """W^Q, W^K, W^V, W^O of grouped-query attention."""
    g = torch.Generator().manual_seed(seed)
    width = width or d // heads
    shapes = [(d, heads * width), (d, groups * width), (d, groups * width), (heads * width, d)]
    return [torch.randn(*shape, generator=g, dtype=dtype) / math.sqrt(shape[0]) for shape in shapes]


def grouped_attention(x, query, key, value, output, heads, groups, *, mask=None, biases=(), scale=None, rotate=None):
    """Grouped-query attention, one head after the other; biases of q, k, v, o or none."""
    qb, kb, vb, ob = biases if biases else (None,) * 4
    width = query.shape[1] // heads
    out = torch.zeros(*x.shape[:2], output.shape[1], dtype=x.dtype)
    q, k, v = (x @ w + (0 if b is None else b) for w, b in ((query, qb), (key, kb), (value, vb)))
    for head in range(heads):
        group = head // (heads // groups)
        mine, theirs = slice(head * width, (head + 1) * width), slice(group * width, (group + 1) * width)
        qh, kh = q[..., mine], k[..., theirs]
        if rotate is not None:
            qh, kh = rotate(qh), rotate(kh)
        logits = qh @ kh.transpose(1, 2) * (width**-0.5 if scale is None else scale)
        if mask is not None:
            logits = logits.masked_fill(~mask, float("-inf"))
        out = out + logits.softmax(-1) @ v[..., theirs] @ output[mine]
    return out if ob is None else out + ob


def measured_ranks(tensor):
    """Numerical ranks of the three unfoldings."""
    return tuple(
        int(torch.linalg.matrix_rank(tensor.movedim(mode, 0).reshape(tensor.shape[mode], -1))) for mode in range(3)
    )
