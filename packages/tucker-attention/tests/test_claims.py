"""Claims and benches: what they are made of, on tiny settings."""

import pytest
import torch

from icml26_shared.claims import Claim, run
from icml26_shared.console import Context
from tucker_attention.baselines import FactoredAttention, GroupedAttention, LatentAttention, svd_truncated
from tucker_attention.claims import CLAIMS, LM_KINDS, VIT_KINDS
from tucker_attention.counts import param_count
from tucker_attention.demo import conclusion
from tucker_attention.eval import small

BY_ID = {claim.id: claim for claim in CLAIMS}


def test_every_row_of_the_specification_is_a_claim():
    assert set(BY_ID) == {
        "special-cases", "vit", "gpt2-parameters", "language-model", "kv-cache", "flash", "rope", "low-rank",
        "llama3-1b", "imagenet",
    }  # fmt: skip
    assert all(claim.rules for claim in CLAIMS)


def test_the_exact_claims_hold_here(tmp_path):
    chosen: list[Claim] = [BY_ID[name] for name in ("special-cases", "gpt2-parameters", "kv-cache", "rope")]
    report = run(chosen, Context(quiet=True, out=tmp_path, distribution="tucker-attention"))
    assert {v.claim.id: v.verdict for v in report.verdicts} == dict.fromkeys((c.id for c in chosen), "holds")


def test_baselines_have_the_formulas_parameters():
    shape = {"d_model": 64, "n_heads": 8}
    counts = {
        GroupedAttention(64, 8): param_count("mha", **shape),
        GroupedAttention(64, 8, 2): param_count("gqa", **shape, n_kv_heads=2),
        GroupedAttention(64, 8, 1): param_count("mqa", **shape),
        LatentAttention(64, 8, 16): param_count("mla", **shape, latent=16),
        LatentAttention(64, 8, 16, separate=True): param_count("mla", **shape, latent=16) + 64 * 16,
        LatentAttention(64, 8, 16, rope_dim=4): param_count("mla", **shape, latent=16) + 16 * 8 * 4 + 64 * 4,
        FactoredAttention(64, 8, 6): 8 * 64 * 6,
    }
    x = torch.randn(2, 5, 64)
    for layer, expected in counts.items():
        assert sum(p.numel() for p in layer.parameters()) == expected
        assert layer(x).shape == x.shape


def test_sizes_of_the_comparison_are_the_specifications():
    built = {name: sum(p.numel() for p in kind.build(64, 8, 3, False).parameters()) for name, kind in VIT_KINDS.items()}
    assert built["GQA-2"] == 10240
    assert built["MLA-16"] == 9216
    assert built["Tucker [2,12,8]"] == 2976 <= 0.35 * built["GQA-2"]
    assert built["Tucker [2,6,4]"] == 1408 <= 0.15 * built["GQA-2"]
    assert built["SVD rank 6"] >= built["Tucker [2,12,8]"]  # the peer gets no fewer parameters
    lm = {name: sum(p.numel() for p in kind.build(128, 8, 4, True).parameters()) for name, kind in LM_KINDS.items()}
    assert lm["Tucker [4,24,16]"] <= 0.4 * lm["GQA-2"]
    assert 0.18 <= lm["Tucker [4,24,16]"] / lm["MHA"] <= 0.4


def test_runs_repeat(monkeypatch):
    pytest.importorskip("sklearn")
    kind = VIT_KINDS["Tucker [2,6,4]"]
    first, again = small.train_digits(kind, 1, 3), small.train_digits(kind, 1, 3)
    assert first == again
    assert 0 <= first["accuracy"] <= 1
    monkeypatch.setattr(small, "CONTEXT", 16)
    first, again = small.train_lm(LM_KINDS["GQA-2"], 1, 2), small.train_lm(LM_KINDS["GQA-2"], 1, 2)
    assert first == again
    assert 3 < first["loss"] < 8  # near ln 256 = 5.5 so early


def test_conclusion_is_drawn_from_the_figures():
    results = {
        "GQA-2": {"accuracy": 0.9, "parameters": 1000},
        "Tucker a": {"accuracy": 0.89, "parameters": 250},
        "Tucker b": {"accuracy": 0.7, "parameters": 100},
    }
    assert conclusion(results).startswith("Tucker a classifies 89.0 %")
    assert "4.0 times as many" in conclusion(results)
    results["Tucker a"]["accuracy"] = 0.5
    assert conclusion(results).startswith("No Tucker attention came within 2 points")


def test_svd_is_the_nearest_of_its_rank():
    matrix = torch.diag(torch.tensor([3.0, 2.0, 1.0]))
    assert torch.allclose(svd_truncated(matrix, 2), torch.diag(torch.tensor([3.0, 2.0, 0.0])), atol=1e-6)
