"""Shared by the tests of manifoldkv: run-time shape checks, tiny models, hypothesis settings."""

from __future__ import annotations

import inspect
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

# Every shape annotation of these modules is checked at run time, in all tests that import them after this line. Kernels
# are left out: Triton reads the source of its functions, which the hook would wrap. So is config: its own checks are
# the subject.
_CHECKED = ("geometry", "rope", "scoring", "selection", "windows", "integrations.transformers")
install_import_hook([f"manifoldkv.{name}" for name in _CHECKED], "beartype.beartype")

settings.register_profile("house", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")


@pytest.fixture(autouse=True)
def _two_threads():
    """Same arithmetic on every machine, and no fight over cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(min(before, 2))
    yield
    torch.set_num_threads(before)


# -- tiny models ------------------------------------------------------------------------------------------------------

_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,  # attention far from uniform, so that an evicted token is missed
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
_MODELS: dict[str, tuple[str, dict]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama3-rope": (
        "LlamaForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2-sliding": ("Qwen2ForCausalLM", {**_MIXED, "use_sliding_window": True}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 8}),
    "phi3": ("Phi3ForCausalLM", {}),
    "phi": ("PhiForCausalLM", {}),
    "gemma2": ("Gemma2ForCausalLM", {**_MIXED, "head_dim": 8, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3ForCausalLM", {**_MIXED, "head_dim": 8, "query_pre_attn_scalar": 8}),
    "mistral": ("MistralForCausalLM", {"sliding_window": None}),
    "mistral-sliding": ("MistralForCausalLM", {"sliding_window": 8}),
    "cohere": ("CohereForCausalLM", {}),
    "gpt_neox": ("GPTNeoXForCausalLM", {}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    "opt": ("OPTForCausalLM", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
}


@pytest.fixture(scope="session")
def tiny():
    """``tiny(name, **settings)``: a random model of two layers in float32, the same for the same arguments."""
    transformers = pytest.importorskip("transformers")
    import torch

    made: dict = {}

    def make(name: str, **settings):
        key = (name, *sorted(settings.items()))
        if key not in made:
            model_class, own = _MODELS[name]
            model_class = getattr(transformers, model_class)
            torch.manual_seed(0)
            config = model_class.config_class(**{**_SMALL, **own, **settings})
            made[key] = model_class(config).eval()
            if name == "gemma2":
                made[key].set_attn_implementation("eager")  # soft-capping, which sdpa leaves out
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A local model folder: a random Llama of two layers with a tokenizer that knows some words, digits and marks."""
    transformers = pytest.importorskip("transformers")
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers

    text = """the grass is green sky blue sun yellow here we go there and back again The Here There One of special
        magic numbers number for What are all mentioned in provided text Some hidden within following Make sure to
        memorize it I will quiz you about afterwards A hi : . , ? ! - 0 1 2 3 4 5 6 7 8 9 Paragraph answer question"""
    words = dict.fromkeys(["<pad>", "<s>", "</s>", "<unk>", *text.split()])
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    split = [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    folder = tmp_path_factory.mktemp("models") / "tiny"
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**_SMALL, "vocab_size": len(vocabulary), "max_position_embeddings": 2048})
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_bart():
    """A random encoder-decoder."""
    transformers = pytest.importorskip("transformers")
    import torch

    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=61,
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=256,
        init_std=0.25,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        decoder_start_token_id=1,
        forced_eos_token_id=None,
    )
    return transformers.BartForConditionalGeneration(config).eval()


# -- the explicit reference -------------------------------------------------------------------------------------------


class Reference:
    """Eviction simulated on dense caches: nothing is removed, evicted keys are masked in a plain attention.

    Written on plain tensors from the definition, sharing no code with the package; scores are float64 (so key norms,
    which rotation leaves equal for equal tokens, make no good metric here: ties would be broken by rounding). While
    active (``with``), the model runs with an attention function that, layer by layer, masks what a key-value head has
    evicted, and afterwards decides what this layer evicts. ``alive`` and ``evictions`` record what happened.
    """

    def __init__(self, model, *, metric, phase="prefill", budget=None, ratio=None, interval=128, n_sink=4, n_recent=32,
                 adaptive=False):  # fmt: skip
        self.model, self.metric, self.phase = model, metric, phase
        self.budget, self.ratio, self.interval = budget, ratio, interval
        self.n_sink, self.n_recent, self.adaptive = n_sink, n_recent, adaptive
        decoder = model.config.get_text_config(decoder=True)
        types = getattr(decoder, "layer_types", None) or ["full_attention"] * decoder.num_hidden_layers
        self.full = [kind == "full_attention" for kind in types]
        self.elsewhere = {m for name, m in model.named_modules() if "encoder_attn" in name or "encoder.layers" in name}
        self.alive: dict = {}  # layer -> bool [B, H, T]
        self.slots: dict = {}  # layer -> slots an implementation would hold: padding counts against the budget
        self.target: dict = {}
        self.evictions: list = []  # (layer, logical length, kept)

    def __enter__(self):
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register("explicit_reference", self.attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register("explicit_reference", eager_mask)
        self.before = self.model.config._attn_implementation
        self.model.set_attn_implementation("explicit_reference")
        return self

    def __exit__(self, *_):
        self.model.set_attn_implementation(self.before)

    def cache(self):
        """A dense cache that moves the record of evictions along with its rows."""
        import torch
        from transformers import DynamicCache

        reference = self

        class Dense(DynamicCache):
            def reorder_cache(self, beam_idx):
                super().reorder_cache(beam_idx)
                reference.alive = {k: v.index_select(0, torch.as_tensor(beam_idx)) for k, v in reference.alive.items()}

        return Dense(config=self.model.config.get_text_config(decoder=True))

    def attend(self, module, query, key, value, attention_mask, scaling=None, softcap=None, **_):
        import torch

        groups = query.shape[1] // key.shape[1]
        layer = module.layer_idx
        compressed = module not in self.elsewhere and self.full[layer]
        scores = query @ key.repeat_interleave(groups, 1).transpose(-1, -2)
        scores = scores * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        bias = torch.zeros(query.shape[0], key.shape[1], query.shape[2], key.shape[2])
        if compressed:
            new = torch.ones(*key.shape[:2], key.shape[2] - self._length(layer), dtype=torch.bool)
            self.alive[layer] = torch.cat((self.alive[layer], new), -1) if layer in self.alive else new
            bias = bias.masked_fill(~self.alive[layer][:, :, None], torch.finfo(torch.float32).min)
        if attention_mask is not None:
            bias = bias + attention_mask[..., : key.shape[2]]
        bias = bias.repeat_interleave(groups, 1).clamp(min=torch.finfo(torch.float32).min)
        out = (scores + bias).softmax(-1) @ value.repeat_interleave(groups, 1)
        if compressed:
            valid = torch.ones(key.shape[0], key.shape[2], dtype=torch.bool)
            if attention_mask is not None:
                valid = (attention_mask[:, 0, -1, : key.shape[2]] == 0).expand(key.shape[0], -1)
            self._maybe_evict(layer, key.detach().double(), valid, query.shape[2])
        return out.transpose(1, 2).contiguous(), None

    def _length(self, layer):
        return self.alive[layer].shape[-1] if layer in self.alive else 0

    def _keep(self, length):
        return self.budget if self.ratio is None else max(int(length * (1 - self.ratio)), 1)

    def _maybe_evict(self, layer, key, valid, step):
        length = key.shape[2]
        first = layer not in self.slots
        self.slots[layer] = self.slots.get(layer, 0) + step
        if first:
            self.target[layer] = self._keep(length)
        n = None
        if (self.phase in ("prefill", "both") and first) or (self.phase == "chunked" and (first or step > 1)):
            n = self._keep(length)
        elif self.phase in ("decode", "both") and not first and self.slots[layer] >= self.target[layer] + self.interval:
            n = self.target[layer]
        if n is None or n >= self.slots[layer]:
            return
        self.slots[layer] = n
        import torch

        for row in range(key.shape[0]):
            scores = [self._scores(key[row, h], self.alive[layer][row, h] & valid[row], valid[row], n)
                      for h in range(key.shape[1])]  # fmt: skip
            kept = self._adaptive(scores, n) if self.adaptive else [_best(s, n) for s in scores]
            for head, indices in enumerate(kept):
                self.alive[layer][row, head] = torch.zeros(length, dtype=torch.bool).index_fill(
                    0, torch.tensor(indices, dtype=torch.long), True
                )
        self.evictions.append((layer, length, self.alive[layer].clone()))

    def _scores(self, key, stored, valid, n):
        """``{index: score}`` of the tokens a head holds."""
        import torch

        where = stored.nonzero()[:, 0].tolist()
        k = key[where]
        if self.metric == "l2":
            values = (k - k.mean(0)).norm(dim=-1)
        elif self.metric == "cosine":
            unit = k / k.norm(dim=-1, keepdim=True)
            anchor = unit.mean(0)
            values = -(unit @ anchor) / anchor.norm()
        elif self.metric == "cosine_mean":
            values = -(k @ k.mean(0)) / k.norm(dim=-1) / k.mean(0).norm()
        else:
            raise AssertionError(self.metric)
        scores = dict(zip(where, values.tolist(), strict=True))
        recent = min(self.n_recent, n)
        sinks = min(self.n_sink, n - recent)
        tokens = valid.nonzero()[:, 0].tolist()
        for index in where:
            if index in tokens[:sinks] or index in where[len(where) - recent :]:
                scores[index] = torch.inf
        return scores

    def _adaptive(self, scores, n):
        import math
        import statistics

        least = math.ceil(n / 5 - 1e-9)
        pool = []
        for head, own in enumerate(scores):
            finite = [s for s in own.values() if math.isfinite(s)]
            mean, sd = (statistics.fmean(finite), statistics.pstdev(finite)) if finite else (0.0, 1.0)
            floor = _best(own, least)
            for index, score in own.items():
                z = (score - mean) / max(sd, 1e-12) if math.isfinite(score) else score
                pool.append((math.inf if index in floor else z, head, index))
        pool.sort(key=lambda item: (-item[0], item[1], item[2]))
        chosen = pool[: len(scores) * n]
        return [sorted(index for _, h, index in chosen if h == head) for head in range(len(scores))]


def _best(scores, n):
    return sorted(sorted(scores, key=lambda i: (-scores[i], i))[:n])


@pytest.fixture
def reference():
    return Reference


def _forward_steps(model, ids, mask, cache, tokens=None, steps=0, chunk=None):
    """Run the prompt (in chunks), then ``steps`` tokens, those of ``tokens`` or the greedy ones.

    ``mask`` also covers what the cache holds already. Returns the logits of the prompt ``[B, T, V]``, of the steps
    ``[B, steps, V]`` and the tokens ``[B, steps]``.
    """
    import torch

    mask = torch.ones_like(ids) if mask is None else mask
    seen = mask.shape[1] - ids.shape[1]  # columns of the mask that belong to what is in the cache already
    prompt, decoded, chosen = [], [], []
    with torch.no_grad():
        width = ids.shape[1] if chunk is None else chunk
        for start in range(0, ids.shape[1], width):
            stop = min(start + width, ids.shape[1])
            prompt.append(_one_forward(model, ids[:, start:stop], mask[:, : seen + stop], cache))
        last = prompt[-1][:, -1]
        for i in range(steps):
            token = last.argmax(-1, keepdim=True) if tokens is None else tokens[:, i : i + 1]
            mask = torch.cat((mask, torch.ones_like(token)), -1)
            last = _one_forward(model, token, mask, cache)[:, -1]
            chosen.append(token)
            decoded.append(last)
    empty = torch.zeros(ids.shape[0], 0, dtype=torch.long)
    return (
        torch.cat(prompt, 1),
        torch.stack(decoded, 1) if decoded else None,
        torch.cat(chosen, 1) if chosen else empty,
    )


def _one_forward(model, ids, mask, cache):
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    extra = {"position_ids": positions} if "position_ids" in inspect.signature(model.forward).parameters else {}
    return model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **extra).logits


@pytest.fixture
def forward_steps():
    return _forward_steps


@pytest.fixture
def prompt():
    """``prompt(rows, length, pads)``: token ids and, where any row is padded on the left, the mask.

    No token twice in a row while the vocabulary lasts: equal tokens have equal norms, and rounding would break the
    ties.
    """
    import torch

    def make(rows, length, pads=None, seed=0):
        generator = torch.Generator().manual_seed(seed)
        blocks = [
            torch.randperm(59, generator=generator)[: min(length, 59)] + 2 for _ in range(rows * (1 + length // 59))
        ]
        ids = torch.cat(blocks).view(rows, -1)[:, :length].contiguous()
        if pads is None:
            return ids, None
        mask = (torch.arange(length)[None] >= torch.tensor(pads)[:, None]).long()
        return ids * mask, mask

    return make
