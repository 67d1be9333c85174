"""Tucker attention: multi-head attention whose weights are two three-way tensors, each in Tucker form (definition 3.1).

    W  = C  x1 U1 x2 U2 x3 U3    modes (head, query, key)      W_h  = W_h^Q W_h^K^T
    Wt = Ct x1 V1 x2 V2 x3 V3    modes (head, output, value)   Wt_h = (W_h^V W_h^O)^T

The forward pass forms neither: with ``T = C x1 U1`` and ``Tt = Ct x1 V1``,

    Q_h = (X U2) T_h,  K = X U3,  A_h = softmax(Q_h K^T scale),  V = X V3,  out = (sum_h A_h V Tt_h^T) V2^T,

which is MQA with keys of width r3 and values of width s3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from tucker_attention import special_cases
from tucker_attention.config import TuckerConfig, parameter_shapes
from tucker_attention.constructors import FromAttention
from tucker_attention.heads import heads_of, merge_heads, selector
from tucker_attention.kernels import latent_attention, latent_decode
from tucker_attention.kernels.masks import combine_masks
from tucker_attention.kernels.rotary import Tables, rotate
from tucker_attention.rope import Angles, new_angles


class TuckerAttention(FromAttention):
    """One low-rank attention layer.

    Args:
        config: shapes and options.

    Parameters: ``C`` [r1, r2, r3], ``U1`` [H, r1], ``U2`` [d, r2], ``U3`` [d, r3]; ``Ct`` [s1, s2, s3], ``V1`` [H, s1],
    ``V2`` [d, s2], ``V3`` [d, s3] (absent with ``share_kv``); ``query_bias`` [r2], ``key_bias`` [r3], ``output_bias``
    [d]. With ``core="per_head"``, instead of C, U1, Ct and V1: ``query_map`` [H, r2, d_H], ``key_map`` [n_KV, r3, d_H],
    ``value_map`` [n_KV, s3, d_V], ``output_map`` [H, s2, d_V], without those named in ``blocks``.

    No factor is kept orthogonal.
    """

    U1: Tensor
    U2: Tensor
    U3: Tensor
    C: Tensor
    V1: Tensor
    V2: Tensor
    V3: Tensor
    Ct: Tensor

    def __init__(self, config: TuckerConfig) -> None:
        super().__init__(config)
        for name, shape in parameter_shapes(config).items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        self._merged: tuple[Tensor, Tensor] | None = None
        self.layer_idx = 0
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise so that logits of unit-variance inputs have unit variance (section 2.5 of the design notes).

        U2, U3, V3 ~ N(0, 1/d); U1 ~ N(0, 1/r1); C ~ N(0, d_H/(r2 r3)); V1 ~ N(0, 1/s1); V2 ~ N(0, 1/s2);
        Ct ~ N(0, g/(H s3)) with g = 1/(2 L). Biases are 0.
        """
        config = self.config
        (r1, r2, r3), (s1, s2, s3) = config.ranks, config.post
        gain = 1 / (2 * config.n_layers)
        # the default scale is 1/sqrt(d_H); for another one the core makes up for it
        variances = {
            "U1": 1 / r1, "U2": 1 / config.d_model, "U3": 1 / config.context, "V3": 1 / config.context,
            "C": 1 / (config.softmax_scale**2 * r2 * r3), "V1": 1 / s1, "V2": 1 / s2,
            "Ct": gain / (config.n_heads * s3), "query_map": 1 / r2, "key_map": 1 / r3, "value_map": 1 / s3,
            "output_map": gain / (config.n_heads * config.value_width),
        }  # fmt: skip
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.normal_(0.0, variances[name] ** 0.5)

    # -- forward -----------------------------------------------------------------------------------------------------

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Any = None,
        is_causal: bool | None = None,
        key_padding_mask: Tensor | None = None,
        context: Tensor | None = None,
        layer_idx: int | None = None,
    ) -> Float[Tensor, "b n d"]:
        """Attend.

        Args:
            x: tokens [B, N, d].
            mask: bool (True: may look, as in `scaled_dot_product_attention`) or additive; [N, M], [B, N, M] or
                [B or 1, H or 1, N, M], where M counts cached tokens too.
            positions: for RoPE, [N] or [B, N]; default: they go on from the cache. Cached tokens of a row must be
                consecutive with ``share_kv``.
            cache: a `TuckerCache` or a transformers ``Cache``; the new latents are appended.
            is_causal: overrides the configuration's ``causal``.
            key_padding_mask: bool [B, M], True for padding, as in `torch.nn.MultiheadAttention`.
            context: tokens [B, M, d_context] that keys and values come from (cross-attention); default x.
            layer_idx: layer of the cache; default the module's ``layer_idx``.

        Returns:
            [B, N, d]. A query that may look at nothing gets the output bias alone.

        Raises:
            ValueError: shapes that do not fit.
        """
        source = x if context is None else context
        self._check_inputs(x, source)
        n = x.shape[1]
        q2 = self._query(x)
        past = 0 if cache is None else cache.get_seq_length(self._layer(layer_idx))
        turns = new_angles(self.config, positions, source.shape[1], int(past), x)
        k, v, key_tables = self._keys_values(source, turns, cache, layer_idx)
        m = k.shape[-2]
        mask4 = self._check_mask(mask, x.shape[0], n, m)
        key_mask = self._check_padding(key_padding_mask, x.shape[0], m)
        causal = self.config.causal if is_causal is None else is_causal
        if x.shape[0] * n * m == 0:
            out2 = q2.new_zeros(x.shape[0], n, self.config.post[1])
        elif self.config.core == "dense":
            out2 = self._attend_latent(q2, k, v, key_tables, mask4, key_mask, causal)
        else:
            out2 = self._attend_heads(q2, k, v, turns, mask4, key_mask, causal)
        return F.linear(out2, self.V2, self._parameter("output_bias"))

    def _query(self, x: Tensor) -> Tensor:
        q2 = x @ self.U2
        bias = self._parameter("query_bias")
        return q2 if bias is None else q2 + bias

    def _keys_values(
        self, source: Tensor, turns: Angles | None, cache: Any, layer_idx: int | None
    ) -> tuple[Tensor, Tensor, Tables | None]:
        """Keys [B, M, r3] ([B, n_KV, M, d_H] with rope="head"), values [B, M, s3], and angles yet to be applied."""
        config = self.config
        k = source @ self.U3
        bias = self._parameter("key_bias")
        if bias is not None:
            k = k + bias
        v = k if config.share_kv else source @ self.V3
        if turns is not None and config.rope == "head":
            k = turns.keys.rotate_queries(heads_of(k, self._parameter("key_map"), config.kv_heads))
        elif turns is not None and not config.share_kv:
            k = rotate(k, turns.keys.cos_q, turns.keys.sin_q, config.rope_interleaved)
        if cache is not None:
            stored = v[..., :0] if config.share_kv else v
            k4, v4 = cache.update(k if k.dim() == 4 else k.unsqueeze(1), stored.unsqueeze(1), self._layer(layer_idx))
            k = k4 if k.dim() == 4 else k4[:, 0]
            v = k if config.share_kv else v4[:, 0]
        if turns is None:
            return k, v, None
        return k, v, turns.of_cache(config, k.shape[1], k) if config.share_kv else turns.query

    def _attend_latent(
        self, q2: Tensor, k: Tensor, v: Tensor, tables: Tables | None, mask: Tensor | None, key_mask: Tensor | None,
        causal: bool,
    ) -> Tensor:  # fmt: skip
        t, tt = self.merged_cores()
        dropout = self.config.dropout if self.training else 0.0
        if q2.shape[1] == 1 and mask is None and dropout == 0.0:
            q = torch.einsum("bnr,hrk->bhnk", q2, t)
            if tables is not None:
                q, k = tables.rotate_queries(q), tables.rotate_keys(k)
            looked = latent_decode(q[:, :, 0], k, v, key_mask=key_mask)
            return torch.einsum("bhs,hts->bt", looked, tt).unsqueeze(1)
        return latent_attention(
            q2, t, k, v, tt, mask=mask, key_mask=key_mask, causal=causal, rotary=tables, dropout=dropout
        )

    def _attend_heads(
        self, q2: Tensor, k: Tensor, v: Tensor, turns: Angles | None, mask: Tensor | None, key_mask: Tensor | None,
        causal: bool,
    ) -> Tensor:  # fmt: skip
        config = self.config
        q = heads_of(q2, self._parameter("query_map"), config.n_heads) * config.softmax_scale
        if turns is not None:
            q = turns.query.rotate_queries(q)
        dropout = config.dropout if self.training else 0.0
        key_map, value_map = self._parameter("key_map"), self._parameter("value_map")
        if q.shape[2] == 1 and k.dim() == 3 and key_map is not None and value_map is not None and mask is None:
            # One query: it goes to the latents of the keys, not the keys to its heads (absorbed decoding).
            group = config.n_heads // config.kv_heads
            absorbed = torch.einsum("bhw,hrw->bhr", q[:, :, 0], key_map.repeat_interleave(group, 0))
            latent = latent_decode(absorbed, k, v, key_mask=key_mask)
            looked = torch.einsum("bhs,hsv->bhv", latent, value_map.repeat_interleave(group, 0)).unsqueeze(2)
        else:
            keys = k if k.dim() == 4 else heads_of(k, key_map, config.kv_heads)
            values = heads_of(v, value_map, config.kv_heads)
            combined = combine_masks(mask, key_mask, causal, q.shape[2], keys.shape[2], q.device)
            if combined is not None and combined.dtype != torch.bool:
                combined = combined.to(q.dtype)
            looked = F.scaled_dot_product_attention(
                q, keys, values, attn_mask=combined, dropout_p=dropout, scale=1.0,
                enable_gqa=config.kv_heads != config.n_heads,
            )  # fmt: skip
            if combined is not None:
                blocked = ~combined if combined.dtype == torch.bool else combined == float("-inf")
                looked = looked.masked_fill(blocked.all(-1, keepdim=True), 0.0)
        return merge_heads(looked, self._parameter("output_map"))

    # -- the tensors -------------------------------------------------------------------------------------------------

    def merged_cores(self) -> tuple[Float[Tensor, "h r2 r3"], Float[Tensor, "h s2 s3"]]:
        """``T = C x1 U1`` with the scale of the logits, and ``Tt = Ct x1 V1``."""
        if self._merged is not None:
            return self._merged
        t, tt = self.slices()
        return t * self.config.softmax_scale, tt

    def slices(self) -> tuple[Float[Tensor, "h r2 r3"], Float[Tensor, "h s2 s3"]]:
        """Each head's core: ``W_h = U2 T_h U3^T`` and ``Wt_h = V2 Tt_h V3^T``."""
        config = self.config
        if config.core == "dense":
            t = torch.einsum("ha,aqk->hqk", self.U1, self.C)
            return t, torch.einsum("ha,aov->hov", self.V1, self.Ct)
        group = config.n_heads // config.kv_heads
        maps = {}
        sizes = {
            "query": (config.ranks[1], config.n_heads, config.width),
            "key": (config.ranks[2], config.kv_heads, config.width),
            "value": (config.post[2], config.kv_heads, config.value_width),
            "output": (config.post[1], config.n_heads, config.value_width),
        }
        for name, (rank, heads, width) in sizes.items():
            found = self._parameter(f"{name}_map")
            maps[name] = selector(rank, heads, width, self.U2) if found is None else found
            if heads != config.n_heads:
                maps[name] = maps[name].repeat_interleave(group, 0)
        t = torch.einsum("hqw,hkw->hqk", maps["query"], maps["key"])
        return t, torch.einsum("how,hvw->hov", maps["output"], maps["value"])

    def to_tensors(self) -> tuple[Float[Tensor, "h d c"], Float[Tensor, "h d c"]]:
        """W and Wt themselves: H d^2 numbers each, for looking at."""
        t, tt = self.slices()
        value = self.U3 if self.config.share_kv else self.V3
        return (
            torch.einsum("dq,hqk,ek->hde", self.U2, t, self.U3),
            torch.einsum("do,hov,ev->hde", self.V2, tt, value),
        )

    def merge(self) -> TuckerAttention:
        """Precompute T and Tt for inference, in eval mode; training mode forgets them. Returns the layer."""
        self.eval()
        if self.config.core == "dense":
            self._merged = None
            with torch.no_grad():
                t, tt = self.merged_cores()
            self._merged = t.contiguous(), tt.contiguous()
        return self

    def truncate(self, ranks: Sequence[Any]) -> TuckerAttention:
        """A new layer of smaller ranks, nearest in the Frobenius norm of W and of Wt (HOOI).

        Args:
            ranks: (r1, r2, r3) for both tensors, or ((r1, r2, r3), (s1, s2, s3)).

        Raises:
            ValueError: ranks above the layer's own, or ``rope="head"``, whose W is not all there is to it.
        """
        return type(self)._built(
            special_cases.truncate(self.config, dict(self.named_parameters()), self.slices(), ranks)
        )

    def train(self, mode: bool = True) -> TuckerAttention:
        """Training or eval mode; training mode forgets what :meth:`merge` computed."""
        if mode:
            self._merged = None
        super().train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        made = super()._apply(fn, recurse)
        if self._merged is not None:
            self._merged = fn(self._merged[0]), fn(self._merged[1])
        return made

    # -- checks ------------------------------------------------------------------------------------------------------

    def _parameter(self, name: str) -> Tensor | None:
        found: Tensor | None = getattr(self, name, None)  # an attribute where it is parametrized, as by adapters
        return found

    def _layer(self, layer_idx: int | None) -> int:
        return self.layer_idx if layer_idx is None else layer_idx

    def _check_inputs(self, x: Tensor, source: Tensor) -> None:
        if x.dim() != 3 or x.shape[2] != self.config.d_model:
            raise ValueError(f"x must be [B, N, {self.config.d_model}], got {tuple(x.shape)}")
        if source.dim() != 3 or source.shape[2] != self.config.context or source.shape[0] != x.shape[0]:
            raise ValueError(
                f"context must be [{x.shape[0]}, M, {self.config.context}], got {tuple(source.shape)}"
                if source is not x
                else f"this layer's keys come from tokens of width {self.config.context}: give context="
            )

    def _check_mask(self, mask: Tensor | None, b: int, n: int, m: int) -> Tensor | None:
        if mask is None:
            return None
        if not (mask.dtype == torch.bool or mask.is_floating_point()):
            raise ValueError(f"mask must be bool (True: may look) or additive floats, got {mask.dtype}")
        four = {2: mask[None, None], 3: mask.unsqueeze(1) if mask.dim() == 3 else mask, 4: mask}.get(mask.dim())
        sizes = (b, self.config.n_heads, n, m)
        if four is None or any(given not in (1, size) for given, size in zip(four.shape, sizes, strict=True)):
            raise ValueError(
                f"mask must be [{n}, {m}], [{b}, {n}, {m}] or [1 or {b}, 1 or {self.config.n_heads}, {n}, {m}], got "
                f"{tuple(mask.shape)}"
            )
        return four.expand(-1, -1, n, m)

    @staticmethod
    def _check_padding(key_padding_mask: Tensor | None, b: int, m: int) -> Tensor | None:
        if key_padding_mask is None:
            return None
        if key_padding_mask.dtype != torch.bool or key_padding_mask.shape != (b, m):
            raise ValueError(
                f"key_padding_mask must be bool [{b}, {m}], True for padding (cached tokens count), got "
                f"{key_padding_mask.dtype} {tuple(key_padding_mask.shape)}"
            )
        return ~key_padding_mask

    def extra_repr(self) -> str:
        """Shapes, for printing."""
        config = self.config
        return f"d={config.d_model}, heads={config.n_heads}, ranks={config.ranks}, post_ranks={config.post}"
