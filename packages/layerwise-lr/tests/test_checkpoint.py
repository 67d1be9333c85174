"""`analyze`: modules, safetensors (one file, shards), GGUF, SmolLM2 against its peers."""

import csv
import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from layerwise_lr import analyze, fit_tail, spectrum
from layerwise_lr.integrations.checkpoint import stored_matrices
from layerwise_lr.measurement import Measure


def alphas(reports):
    return {r.name: r.alpha for r in reports if r.fitted}


def test_a_module_and_its_files_give_the_same(model, tmp_path):
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    expected = alphas(analyze(model))
    assert len(expected) == 6
    save_file(state, tmp_path / "model.safetensors")
    assert alphas(analyze(tmp_path / "model.safetensors")) == alphas(analyze(tmp_path)) == expected
    shards = tmp_path / "shards"
    shards.mkdir()
    names, where = sorted(state), {}
    for index in range(3):
        part = {name: state[name] for name in names[index::3]}
        save_file(part, shards / f"model-{index}.safetensors")
        where |= dict.fromkeys(part, f"model-{index}.safetensors")
    index = shards / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    assert alphas(analyze(shards)) == alphas(analyze(index)) == expected
    (shards / "model-1.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"names 1 file\(s\) that are not there: model-1.safetensors"):
        analyze(shards)


def test_reports(model):
    reports = {r.name: r for r in analyze(model)}
    assert list(reports) == ["embed", *[f"layers.{i}.{p}" for i in (0, 1) for p in ("mix", "up", "down")], "head"]
    assert reports["embed"].note == "embedding: not fitted"
    report, eigs = reports["layers.0.up"], spectrum(model.layers[0].up.weight)
    fit = fit_tail(eigs)
    assert (report.alpha, report.xmin, report.D, report.sigma) == (fit.alpha, fit.xmin, fit.D, fit.sigma)
    assert report.alphahat == pytest.approx(fit.alpha * math.log10(float(eigs[-1])))
    assert report.stable_rank == pytest.approx(float(eigs.sum() / eigs[-1]))
    p = (eigs / eigs.sum()).numpy()
    assert report.entropy == pytest.approx(float(-(p * np.log(p)).sum() / math.log(64)))
    assert 0 < report.seconds < 60
    assert not math.isnan({r.name: r for r in analyze(model, embeddings=True)}["head"].alpha)


def test_frame(model):
    pandas = pytest.importorskip("pandas")
    frame = analyze(model, as_frame=True, fit="gof", min_dim=10)
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame["alpha"].dropna()) == [r.alpha for r in analyze(model, fit="gof", min_dim=10) if r.fitted]
    with pytest.raises(TypeError, match="give measure or keywords"):
        analyze(model, measure=Measure(), fit="gof")


def test_small_weights_odd_dtypes_and_nan(tmp_path):
    g = torch.Generator().manual_seed(0)
    w = torch.randn(60, 70, generator=g)
    save_file(
        {
            "layers.10.w.weight": w, "layers.2.w.weight": w.bfloat16(), "row.weight": torch.ones(1, 500),
            "codes": torch.ones(60, 60, dtype=torch.int8), "nan.weight": torch.full((60, 60), math.nan),
            "f8.weight": w.to(torch.float8_e4m3fn), "vector": torch.ones(9), "zero.weight": torch.zeros(60, 60),
            "empty.weight": torch.ones(0, 5), "conv.weight": torch.randn(20, 20, 3, generator=g),
        },
        tmp_path / "m.safetensors",
    )  # fmt: skip
    reports = {r.name: r for r in analyze(tmp_path / "m.safetensors")}
    assert list(reports).index("layers.2.w") < list(reports).index("layers.10.w")
    assert "vector" not in reports
    notes = {name: r.note for name, r in reports.items() if r.note}
    assert notes == {
        "row": "1 eigenvalues, fewer than min_dim = 50", "codes": "stored as I8: dequantise it first",
        "nan": "NaN or infinite weights", "zero": "fewer than two positive eigenvalues", "empty": "empty",
    }  # fmt: skip
    assert reports["conv"].shape == (20, 20, 3)
    assert reports["layers.2.w"].alpha == pytest.approx(fit_tail(spectrum(w.bfloat16().double())).alpha)
    assert reports["f8"].alpha == pytest.approx(reports["layers.10.w"].alpha, rel=0.05)


def test_gguf_quantised(tmp_path):
    gguf = pytest.importorskip("gguf")
    w = np.random.default_rng(0).normal(size=(64, 96)).astype(np.float32)
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    packed = gguf.quants.quantize(w, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.attn_q.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.ffn_up.weight", w.astype(np.float16))
    writer.add_tensor("token_embd.weight", w[:50])
    writer.add_tensor("blk.0.norm.weight", w[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reports = {r.name: r for r in analyze(path)}
    exact = fit_tail(spectrum(torch.from_numpy(w))).alpha
    assert set(reports) == {"blk.0.attn_q", "blk.0.ffn_up", "token_embd"}
    assert reports["blk.0.ffn_up"].shape == (64, 96)
    assert reports["blk.0.ffn_up"].alpha == pytest.approx(exact, rel=1e-3)
    dequantised = torch.from_numpy(gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0))
    assert reports["blk.0.attn_q"].alpha == pytest.approx(fit_tail(spectrum(dequantised)).alpha, rel=1e-9)
    assert alphas(analyze(tmp_path)) == alphas(analyze(path))


def test_what_is_no_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing.gguf does not exist"):
        analyze(tmp_path / "nothing.gguf")
    with pytest.raises(ValueError, match=r"has no \*.safetensors"):
        analyze(tmp_path)
    for name, message in {
        "a.safetensors": "not a readable safetensors file",
        "a.gguf": "not a readable GGUF file",
        "a.pt": "pickled weights can run code",
        "a.safetensors.index.json": "not an index of safetensors files",
    }.items():
        (tmp_path / name).write_bytes(b"nonsense" * 4)
        if name.endswith("gguf"):
            pytest.importorskip("gguf")
        with pytest.raises(ValueError, match=message):
            analyze(tmp_path / name)


@pytest.fixture(scope="module")
def smollm2_folder():
    from icml26_shared import models

    return models.path("smollm2")


@pytest.fixture(scope="module")
def some_weights(smollm2_folder):
    """Matrices of three blocks of SmolLM2-135M."""
    wanted = ("layers.0.", "layers.14.", "layers.29.")
    return {t.name: t.read() for t in stored_matrices(smollm2_folder) if any(block in t.name for block in wanted)}


def test_smollm2_gram_is_svd_is_float64(some_weights):
    assert len(some_weights) == 21
    median = Measure()
    for name, w in some_weights.items():
        exact = fit_tail(torch.linalg.svdvals(w.double()).square()).alpha
        assert abs(median(name, w).alpha - exact) <= 1e-4
        if "layers.0." in name:
            assert abs(fit_tail(spectrum(w, "svd")).alpha - exact) <= 1e-4


def test_smollm2_gof_is_weightwatchers(some_weights):
    pytest.importorskip("weightwatcher")
    from torch import nn

    from layerwise_lr.eval.peers import weightwatcher_alphas

    chosen = {name: w for name, w in some_weights.items() if "layers.14." in name}
    model = nn.ModuleDict()
    for name, w in chosen.items():
        layer = nn.Linear(w.shape[1], w.shape[0], bias=False)
        layer.weight.data = w
        model[name.split(".")[-2]] = layer
    peer = weightwatcher_alphas(model)
    ours = alphas(analyze(model, fit="gof"))
    assert len(ours) == 7
    assert ours == pytest.approx(peer, abs=1e-4)


def test_csv_reads_back(model):
    from layerwise_lr.cli_analyze import to_csv

    rows = list(csv.DictReader(to_csv(analyze(model)).splitlines()))
    assert [row["name"] for row in rows] == [r.name for r in analyze(model)]
    assert rows[1]["shape"] == "64x64"
    assert float(rows[1]["alpha"]) == analyze(model)[1].alpha
