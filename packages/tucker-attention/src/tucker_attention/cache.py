"""What decoding keeps of past tokens: the latents that all heads share.

A token leaves r3 + s3 numbers a layer (r3 with ``share_kv``), whatever the number of heads. The interface is the part
of transformers' ``Cache`` that a layer uses, ``update(keys, values, layer_idx)``, so either may be handed to a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass
class _Layer:
    keys: Tensor
    values: Tensor
    length: int


class TuckerCache:
    """Latent cache of all layers of a model.

    Args:
        max_length: room for this many tokens is taken at once, and more are an error; None: the cache grows.

    Keys and values are [B, G, M, width]; G is 1 for latents.
    """

    def __init__(self, max_length: int | None = None) -> None:
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {max_length}")
        self.max_length = max_length
        self._layers: dict[int, _Layer] = {}

    def update(
        self, keys: Float[Tensor, "b g n k"], values: Float[Tensor, "b g2 n v"], layer_idx: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Append the new tokens of a layer.

        Returns:
            All keys and values so far, views into the cache.

        Raises:
            ValueError: another batch size or width than what is cached, or no room.
        """
        layer = self._layers.get(layer_idx)
        if layer is not None and keys.shape[0] != layer.keys.shape[0]:
            raise ValueError(
                f"the cache holds a batch of {layer.keys.shape[0]}, the new tokens are a batch of {keys.shape[0]}; "
                "reorder() or repeat() the cache, or start a new one"
            )
        if layer is not None and (keys.shape[-1], values.shape[-1]) != (layer.keys.shape[-1], layer.values.shape[-1]):
            raise ValueError(
                f"the cache holds keys and values of width {layer.keys.shape[-1]} and {layer.values.shape[-1]} in "
                f"layer {layer_idx}, got {keys.shape[-1]} and {values.shape[-1]}: it belongs to another layer"
            )
        if self.max_length is None:
            layer = self._grown(layer, keys, values)
        else:
            layer = self._written(layer, keys, values, self.max_length)
        self._layers[layer_idx] = layer
        return layer.keys[:, :, : layer.length], layer.values[:, :, : layer.length]

    @staticmethod
    def _grown(layer: _Layer | None, keys: Tensor, values: Tensor) -> _Layer:
        if layer is None:
            return _Layer(keys, values, keys.shape[2])
        joined = torch.cat([layer.keys, keys], 2), torch.cat([layer.values, values], 2)
        return _Layer(*joined, layer.length + keys.shape[2])

    @staticmethod
    def _written(layer: _Layer | None, keys: Tensor, values: Tensor, room: int) -> _Layer:
        start = 0 if layer is None else layer.length
        stop = start + keys.shape[2]
        if stop > room:
            raise ValueError(f"the cache has room for {room} tokens; {start} are in it and {keys.shape[2]} more came")
        if layer is None:
            buffers = [x.new_zeros(x.shape[0], x.shape[1], room, x.shape[3]) for x in (keys, values)]
            layer = _Layer(buffers[0], buffers[1], 0)
        layer.keys[:, :, start:stop], layer.values[:, :, start:stop] = keys.detach(), values.detach()
        return _Layer(layer.keys, layer.values, stop)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that are cached."""
        return self._layers[layer_idx].length if layer_idx in self._layers else 0

    def __len__(self) -> int:
        return len(self._layers)

    def crop(self, length: int) -> None:
        """Forget all but the first ``length`` tokens; a negative length forgets that many of the last."""
        for layer in self._layers.values():
            kept = length if length >= 0 else max(0, layer.length + length)
            layer.length = min(layer.length, kept)
            if self.max_length is None:
                layer.keys, layer.values = layer.keys[:, :, : layer.length], layer.values[:, :, : layer.length]

    def reorder(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order: what beam search does between steps."""
        for layer in self._layers.values():
            index = rows.to(layer.keys.device)
            layer.keys, layer.values = layer.keys.index_select(0, index), layer.values.index_select(0, index)

    reorder_cache = reorder

    def repeat(self, times: int) -> None:
        """Repeat every row of the batch, for several continuations of one prompt."""
        if times < 1:
            raise ValueError(f"repeat takes at least 1, got {times}")
        for layer in self._layers.values():
            layer.keys, layer.values = (x.repeat_interleave(times, 0) for x in (layer.keys, layer.values))

    @property
    def nbytes(self) -> int:
        """Bytes of the cached tokens (of the whole room with ``max_length``)."""
        tensors = [x for layer in self._layers.values() for x in (layer.keys, layer.values)]
        return sum(x.numel() * x.element_size() for x in tensors)
