"""The paper's claims as checks: ``tucker claims``. Rules and thresholds were set before the runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from icml26_shared.claims import Claim, ClaimContext, Measurement, Rule
from tucker_attention.attention import TuckerAttention
from tucker_attention.cache import TuckerCache
from tucker_attention.config import TuckerConfig
from tucker_attention.eval.exactness import special_case_errors
from tucker_attention.eval.small import LM_STEPS, VIT_STEPS, Kind, train_digits, train_lm

VIT_KINDS = {
    "MHA": Kind("gqa", 8),
    "GQA-2": Kind("gqa", 2),
    "MLA-16": Kind("mla", 16),
    "Tucker [2,12,8]": Kind("tucker", (2, 12, 8)),  # 2976 parameters a block, 0.29 of GQA-2's
    "Tucker [2,6,4]": Kind("tucker", (2, 6, 4)),  # 1408, 0.14 of GQA-2's
    "SVD rank 6": Kind("svd", 6),  # 3072
    "SVD rank 3": Kind("svd", 3),  # 1536
}
LM_KINDS = {
    "MHA": Kind("gqa", 8),
    "GQA-2": Kind("gqa", 2),
    "MLA-24": Kind("mla", 24),
    "Tucker [4,24,16]": Kind("tucker", (4, 24, 16)),  # 13376: 0.20 of MHA's, 0.33 of GQA-2's
}


def run(ctx: ClaimContext, task: str, name: str, seed: int) -> dict[str, Any]:
    """One training run, kept for all claims."""
    train, kinds, steps = {
        "digits": (train_digits, VIT_KINDS, VIT_STEPS),
        "bytes": (train_lm, LM_KINDS, LM_STEPS),
    }[task]  # type: ignore[index]

    def compute() -> dict[str, Any]:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # one order of sums on every machine
        try:
            with ctx.progress(f"{task}: {name}, seed {seed}", steps) as bar:
                return train(kinds[name], seed, on_step=bar.advance)
        finally:
            torch.set_num_threads(threads)

    found: dict[str, Any] = ctx.shared((task, name, seed), compute)
    return found


def check_special_cases(ctx: ClaimContext) -> dict[str, Any]:
    """Largest output error and the mode ranks, five shapes each."""
    found = ctx.cached("errors", special_case_errors)
    return {name: Measurement(values) for name, values in found.items()}


def check_digits(ctx: ClaimContext) -> dict[str, Any]:
    """Accuracy in percent and parameters over GQA-2's."""
    accuracy = {n: [100 * run(ctx, "digits", n, s)["accuracy"] for s in ctx.seeds] for n in VIT_KINDS}
    parameters = {n: run(ctx, "digits", n, ctx.seeds[0])["parameters"] for n in VIT_KINDS}
    lead = [a - b for a, b in zip(accuracy["SVD rank 6"], accuracy["Tucker [2,12,8]"], strict=True)]
    return {
        **{f"accuracy, {name}": Measurement(values) for name, values in accuracy.items()},
        **{f"parameters over GQA-2's, {n}": [p / parameters["GQA-2"]] for n, p in parameters.items()},
        "SVD rank 6 minus Tucker [2,12,8]": Measurement(lead),
    }


def check_counts(ctx: ClaimContext) -> dict[str, Any]:
    """Parameters of real modules at GPT-2's shapes, in percent and times."""
    d, heads = 768, 12
    held = {
        ranks: _size(TuckerAttention(TuckerConfig(d, heads, ranks))) for ranks in ((8, 128, 64), (8, 64, 64))
    }  # fmt: skip
    mha = _size(Kind("gqa", heads).build(d, heads, 12, True))
    mla = _size(Kind("mla", 128).build(d, heads, 12, True))
    return {
        "[8,128,64] of MHA, %": [100 * held[8, 128, 64] / mha],
        "[8,128,64] of MLA-128, %": [100 * held[8, 128, 64] / mla],
        "MHA over [8,64,64]": [mha / held[8, 64, 64]],
        "MB of MHA": [24 * mha / 1e6],
        "MB of MLA-128": [24 * mla / 1e6],
        "MB of [8,128,64]": [24 * held[8, 128, 64] / 1e6],
        "MB of [8,64,64]": [24 * held[8, 64, 64] / 1e6],
    }


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def check_lm(ctx: ClaimContext) -> dict[str, Any]:
    """Held-out loss, nats a byte."""
    loss = {n: [run(ctx, "bytes", n, s)["loss"] for s in ctx.seeds] for n in LM_KINDS}
    parameters = {n: run(ctx, "bytes", n, ctx.seeds[0])["parameters"] for n in LM_KINDS}
    return {
        **{f"loss, {name}": Measurement(values) for name, values in loss.items()},
        **{f"parameters over MHA's, {n}": [p / parameters["MHA"]] for n, p in parameters.items()},
        **{f"parameters over GQA-2's, {n}": [p / parameters["GQA-2"]] for n, p in parameters.items()},
    }


def check_cache(ctx: ClaimContext) -> dict[str, Any]:
    """Bytes of the live cache over the formula's."""
    ratios = []
    for share, heads, ranks in ((False, 12, (8, 128, 64)), (True, 12, (8, 64, 64)), (False, 4, (3, 20, 18))):
        layer = TuckerAttention(TuckerConfig(96 if heads == 4 else 768, heads, ranks, share_kv=share, rope="latent"))
        cache = TuckerCache()
        with torch.no_grad():
            layer(torch.randn(2, 7, layer.config.d_model), cache=cache)
            layer(torch.randn(2, 1, layer.config.d_model), cache=cache)
        ratios.append(cache.nbytes / (2 * 8 * (1 if share else 2) * ranks[2] * 4))
    return {"bytes over the formula": Measurement(ratios)}


def check_flash(ctx: ClaimContext) -> dict[str, Any]:
    """The latent op against naive softmax, by torch's fused function with one key head; and what it allocates."""
    from icml26_shared.bench import peak_memory
    from tucker_attention.kernels import latent_attention

    errors, growth = [], []
    for n in (33, 512):
        g = torch.Generator().manual_seed(n)
        shapes = ((2, n, 24), (6, 24, 16), (2, n, 16), (2, n, 16), (6, 24, 16))
        arguments = [torch.randn(*shape, generator=g) / 3 for shape in shapes]
        naive = latent_attention(*arguments, causal=True, prefer="torch")
        errors.append(float((latent_attention(*arguments, causal=True, prefer="cpu") - naive).abs().max()))
    peaks = []
    for n in (1024, 2048):
        arguments = [
            torch.randn(*shape) / 3 for shape in ((1, n, 24), (6, 24, 16), (1, n, 16), (1, n, 16), (6, 24, 16))
        ]
        used = peak_memory(lambda a=arguments: latent_attention(*a, causal=True, prefer="cpu"))  # type: ignore[misc]
        peaks.append(float(used.torch_bytes or 0))
        growth.append(peaks[-1] / (4 * 6 * n * n))
    return {"error": errors, "bytes over all logits'": growth, "bytes, twice the tokens": [peaks[1] / peaks[0]]}


def check_rope(ctx: ClaimContext) -> dict[str, Any]:
    """Shifted positions, cached decoding, and fusion of MLA's query matrices, in float64."""
    shifted, cached, fused = [], [], []
    for seed in ctx.seeds:
        torch.manual_seed(seed)
        layer = TuckerAttention(TuckerConfig(48, 6, (4, 20, 16), rope="latent", causal=True)).double()
        x = torch.randn(2, 12, 48, dtype=torch.float64)
        with torch.no_grad():
            full, cache = layer(x), TuckerCache()
            shifted.append(float((layer(x, positions=torch.arange(12) + 1000) - full).abs().max()))
            steps = torch.cat([layer(x[:, i : i + 1], cache=cache) for i in range(12)], 1)
            cached.append(float((steps - full).abs().max()))
            down, up, key_up = (torch.randn(*s, dtype=torch.float64) for s in ((48, 20), (20, 8), (16, 8)))
            apart, whole = ((x @ down) @ up) @ key_up.T, x @ (down @ up @ key_up.T)
            fused.append(float((apart - whole).abs().max() / whole.abs().max()))
    return {"shifted by 1000": shifted, "cached against full": cached, "fused queries, relative": fused}


def check_spectra(ctx: ClaimContext) -> dict[str, Any]:
    """Share of each mode that holds 90 % of its energy, over the layers of SmolLM2-135M and MiniLM."""
    found = ctx.cached("spectra", measure_spectra)
    return {name: Measurement(values) for name, values in found.items()}


def measure_spectra() -> dict[str, list[float]]:
    """Ranks at 90 % over mode sizes, per mode and model; and the ranks of SmolLM2's layer 15."""
    from icml26_shared import models
    from tucker_attention.spectra import TENSORS, attention_spectra

    found: dict[str, list[float]] = {}
    for name in ("smollm2", "minilm"):
        report = attention_spectra(models.load(name, dtype="float32")[0])
        for tensor, modes in TENSORS.items():
            for index, mode in enumerate(modes):
                key = f"{name}, {tensor}, {mode}: rank at 90 % over exact rank"
                full = [layer.ranks(tensor, 1.0)[index] for layer in report.layers]
                few = [layer.ranks(tensor, 0.9)[index] for layer in report.layers]
                found[key] = [a / b for a, b in zip(few, full, strict=True)]
        if name == "smollm2":
            for tensor in TENSORS:
                for energy in (0.9, 1.0):
                    ranks = report.layers[15].ranks(tensor, energy)
                    for mode, rank in zip(TENSORS[tensor], ranks, strict=True):
                        found[f"layer 15, {tensor}, {mode}, {energy:g}"] = [float(rank)]
    return found


_SEEDS = 5
_PUBLISHED_HERE = {
    "W": {"head": 7, "query": 143, "key": 81},
    "Wt": {"head": 7, "output": 204, "value": 127},
}
_LAYER_15 = [
    Rule(f"layer 15, {tensor}, {mode}, 0.9", op, rank)
    for tensor, modes in _PUBLISHED_HERE.items()
    for mode, rank in modes.items()
    for op in ("<=", ">=")
]

CLAIMS = [
    Claim(
        "special-cases",
        "MHA, MQA, GQA and MLA are exact special cases",
        "theorems B.2 to B.4",
        check_special_cases,
        [Rule("output error", "<=", 1e-10, on="every"), Rule("ranks unlike the table", "<=", 0, on="every")],
        seeds=1,
    ),
    Claim(
        "vit",
        "An order of magnitude fewer parameters at a validation metric like GQA's and MLA's (digits ViT)",
        "abstract",
        check_digits,
        [
            Rule("parameters over GQA-2's, Tucker [2,12,8]", "<=", 0.35),
            Rule("accuracy, Tucker [2,12,8]", ">=", -1.5, plus="accuracy, GQA-2"),
            Rule("accuracy, Tucker [2,12,8]", ">=", -1.5, plus="accuracy, MLA-16"),
            Rule("accuracy, Tucker [2,12,8]", ">=", -3, plus="accuracy, GQA-2", on="interval"),
            Rule("accuracy, Tucker [2,12,8]", ">=", -3, plus="accuracy, MLA-16", on="interval"),
            Rule("parameters over GQA-2's, Tucker [2,6,4]", "<=", 0.15),
            Rule("accuracy, Tucker [2,6,4]", ">=", -4, plus="accuracy, GQA-2"),
            Rule("accuracy, Tucker [2,6,4]", ">=", -4, plus="accuracy, MLA-16"),
            Rule("SVD rank 6 minus Tucker [2,12,8]", "<=", 0),
        ],
        seeds=_SEEDS,
    ),
    Claim(
        "gpt2-parameters",
        "GPT-2: [8,128,64] has 18 % of MHA's and 39 % of MLA's attention parameters; up to 9 times fewer",
        "table 2",
        check_counts,
        [
            Rule("[8,128,64] of MHA, %", ">=", 17.96),
            Rule("[8,128,64] of MHA, %", "<=", 18.16),
            Rule("[8,128,64] of MLA-128, %", ">=", 39.31),
            Rule("[8,128,64] of MLA-128, %", "<=", 39.51),
            Rule("MHA over [8,64,64]", ">=", 8.89),
            Rule("MHA over [8,64,64]", "<=", 9.09),
        ],
        seeds=1,
    ),
    Claim(
        "language-model",
        "A competitive language-modelling loss at a fraction of the parameters (bytes of the standard library)",
        "table 2",
        check_lm,
        [
            Rule("parameters over GQA-2's, Tucker [4,24,16]", "<=", 0.4),
            Rule("loss, Tucker [4,24,16]", "<=", 1.03, times="loss, GQA-2"),
        ],
        seeds=3,
    ),
    Claim(
        "kv-cache",
        "The cache holds 2 N r3 numbers a layer, N r3 with a shared latent",
        "section 3",
        check_cache,
        [Rule("bytes over the formula", "<=", 1, on="every"), Rule("bytes over the formula", ">=", 1, on="every")],
        seeds=1,
    ),
    Claim(
        "flash",
        "Compatible with flash attention",
        "abstract",
        check_flash,
        [
            Rule("error", "<=", 1e-4, on="every"),
            Rule("bytes over all logits'", "<=", 0.25, on="every"),
            Rule("bytes, twice the tokens", "<=", 2.2),
        ],
        seeds=1,
    ),
    Claim(
        "rope",
        "Compatible with RoPE; MLA needs no decoupled rotary part",
        "corollary 3.2.1",
        check_rope,
        [
            Rule("shifted by 1000", "<=", 1e-5, on="every"),
            Rule("cached against full", "<=", 1e-5, on="every"),
            Rule("fused queries, relative", "<=", 1e-10, on="every"),
        ],
    ),
    Claim(
        "low-rank",
        "Trained models are low-rank in all modes, heads among them (layer 15 of SmolLM2 as published here)",
        "abstract",
        check_spectra,
        _LAYER_15,
        seeds=1,
    ),
    Claim(
        "llama3-1b",
        "LLaMA3-1B: 10 to 20 % of GQA-8's attention parameters, 1 to 3 % more loss, up to 20 % faster",
        "table 3",
        rule=Rule("loss over GQA-8's", "<=", 1.03),
        needs="a GPU and the training data on disk",
        command="train with tucker_attention.integrations.models.convert_model on a LLaMA3-1B configuration",
    ),
    Claim(
        "imagenet",
        "ViT-B/16 on ImageNet: near 10 times fewer parameters than GQA and MLA at equal accuracy",
        "table 1",
        rule=Rule("accuracy", ">=", 0, plus="accuracy of GQA"),
        needs="a GPU and ImageNet on disk",
        command="train timm's vit_base_patch16_224 after tucker_attention.integrations.timm.use_tucker(model, ranks)",
    ),
]
