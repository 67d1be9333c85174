"""Rotary position embedding undone, so that keys can be scored as they were before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """The rotation a model applied to its keys.

    Attributes:
        inv_freq: angular frequency of each pair of dimensions, radians per token, shape ``[rotary_dim / 2]``.
        scaling: factor on cosine and sine (attention scaling of YaRN-like embeddings); 1 elsewhere.
        interleaved: pairs are neighbouring dimensions (GPT-J, Cohere) rather than halves (Llama, Qwen, Phi).
    """

    inv_freq: Float[Tensor, " half"]
    scaling: float = 1.0
    interleaved: bool = False

    @torch.no_grad()
    def undo(
        self, keys: Float[Tensor, "batch heads tokens dim"], positions: Int64[Tensor, "*rows tokens"]
    ) -> Float[Tensor, "batch heads tokens dim"]:
        """Keys before rotation: ``k_pre = (k cos(p f) - rotate_half(k) sin(p f)) / scaling``, ``p`` the position.

        Only the rotary dimensions (the first ``2 len(inv_freq)``) change. ``positions`` broadcasts to ``[B, H, T]``.
        Returns float32.

        Raises:
            ValueError: more rotary dimensions than the keys have.
        """
        half = self.inv_freq.numel()
        if 2 * half > keys.shape[-1]:
            raise ValueError(f"the rotation covers {2 * half} dimensions, but the keys have {keys.shape[-1]}")
        angle = positions[..., None].to(keys.device, torch.float64) * self.inv_freq.to(keys.device, torch.float64)
        cos, sin = angle.cos().float(), angle.sin().float()
        rotated, rest = keys[..., : 2 * half].float(), keys[..., 2 * half :].float()
        if self.interleaved:
            first, second = rotated[..., 0::2], rotated[..., 1::2]
            pairs = (first * cos + second * sin, second * cos - first * sin)
            plain = torch.stack(pairs, dim=-1).flatten(-2)
        else:
            first, second = rotated[..., :half], rotated[..., half:]
            plain = torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)
        return torch.cat((plain / self.scaling, rest), dim=-1)
