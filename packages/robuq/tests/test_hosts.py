"""End to end inside diffusers, timm and Lightning, and through the file formats of llama.cpp and BitNet."""

import copy
import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

import robuq
from icml26_shared.torchvision_ops import declare_missing_operators
from robuq.config import RobuQConfig
from robuq.errors import RobuqFormatError
from robuq.integrations.bitnet import export_bitnet, pack_bitnet
from robuq.packed import PackedLinear
from robuq.surgery import freeze, quantised_names, quantize


@pytest.fixture(scope="module")
def diffusers():
    declare_missing_operators()
    return pytest.importorskip("diffusers")


@pytest.fixture(scope="module")
def timm():
    declare_missing_operators()
    return pytest.importorskip("timm")


def test_diffusers_dit_end_to_end(diffusers, tmp_path):
    torch.manual_seed(0)
    make = {
        "num_attention_heads": 2, "attention_head_dim": 72, "in_channels": 4, "out_channels": 8, "num_layers": 1,
        "sample_size": 8, "patch_size": 2, "num_embeds_ada_norm": 1000,
    }  # fmt: skip
    model = diffusers.DiTTransformer2DModel(**make).eval()
    model.save_pretrained(tmp_path / "fp")
    inputs = {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "timestep": torch.tensor([10, 900]),
        "class_labels": torch.tensor([3, 4]),
    }
    config = RobuQConfig.for_dit(act_bits=2, rank=4)
    quantize(model, config)
    names = quantised_names(model)
    block = "transformer_blocks.0"
    expected = {f"{block}.{n}" for n in ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0")}
    expected |= {f"{block}.{n}" for n in ("ff.net.0.proj", "ff.net.2", "norm1.linear")}
    assert set(names) == expected
    assert model.get_submodule(f"{block}.norm1.linear").bits == 4
    assert model.get_submodule(f"{block}.attn1.to_q").bits == 2
    frozen = freeze(copy.deepcopy(model))
    with torch.no_grad():
        fake, exact = model(**inputs).sample, frozen(**inputs).sample
    assert float((fake - exact).abs().max() / fake.abs().max()) < 1e-4
    robuq.save_pretrained(frozen, tmp_path / "packed")
    loaded = robuq.load_pretrained(tmp_path / "packed")
    streamed = robuq.from_pretrained(tmp_path / "fp", config)
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).sample, exact)
        assert torch.equal(streamed(**inputs).sample, exact)


def test_timm_vit_end_to_end(timm, tmp_path):
    from robuq.integrations.timm import quantize_timm, save_timm

    settings = {"img_size": 32, "depth": 1, "num_classes": 5}
    torch.manual_seed(0)
    model = quantize_timm("vit_tiny_patch16_224", RobuQConfig.for_vit(rank=4), **settings)
    assert set(quantised_names(model)) == {f"blocks.0.{n}" for n in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}
    save_timm(model, tmp_path / "vit", "vit_tiny_patch16_224", **settings)
    loaded = robuq.load_pretrained(tmp_path / "vit")
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))
    torch.manual_seed(0)
    plain = timm.create_model("vit_tiny_patch16_224", pretrained=False, **settings)
    torch.save(plain.state_dict(), tmp_path / "w.pt")
    streamed = quantize_timm("vit_tiny_patch16_224", RobuQConfig.for_vit(rank=4), tmp_path / "w.pt", **settings)
    with torch.no_grad():
        assert torch.equal(streamed(x), model(x))
    with pytest.raises(ValueError, match="timm knows no model 'vit_none'"):
        quantize_timm("vit_none")


def test_lightning_callback_plans_and_packs(tmp_path):
    declare_missing_operators()
    lightning = pytest.importorskip("lightning")
    from robuq.integrations.lightning import RobuQLightningCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = quantize(nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 3)), RobuQConfig(rank=2))

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, index):
            return (self(batch) - batch[:, :3]).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-3)

    torch.manual_seed(0)
    data = torch.randn(32, 6)
    module, callback = Module(), RobuQLightningCallback(2.0, [data], warm=2)
    trainer = lightning.Trainer(
        max_steps=4, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[callback], default_root_dir=str(tmp_path),
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
    plan = callback.schedule.plan
    assert plan.avg <= 2
    assert set(plan.bits) == {"net.0", "net.2"}
    assert isinstance(module.net[0], PackedLinear)
    assert module.net[0].bits == plan.bits["net.0"]
    other = RobuQLightningCallback(2.0, [data], warm=2)
    other.load_state_dict(json.loads(json.dumps(callback.state_dict())))
    assert other.schedule.plan == plan


def small():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 8), nn.GELU(), nn.Linear(8, 12))
    return freeze(quantize(model, RobuQConfig(rank=2)))


@pytest.mark.parametrize("kind", ["tq2_0", "tq1_0"])
def test_gguf_blocks_read_back_equal(tmp_path, kind):
    pytest.importorskip("gguf")
    from robuq.integrations.gguf import export_gguf, read_gguf_codes

    model = small()
    path = export_gguf(model, tmp_path / f"m.{kind}.gguf", kind)
    found = read_gguf_codes(path)
    assert set(found) == {"0", "2"}
    for name, (codes, alpha) in found.items():
        layer = model.get_submodule(name)
        assert np.array_equal(codes, layer.codes().numpy())
        assert np.array_equal(alpha, layer.alpha.numpy())
    with pytest.raises(ValueError, match="kind must be one of 'tq2_0', 'tq1_0', got 'q4_0'"):
        export_gguf(model, tmp_path / "x", "q4_0")


def test_gguf_of_others_is_refused(tmp_path):
    gguf = pytest.importorskip("gguf")
    from robuq.integrations.gguf import read_gguf_codes

    writer = gguf.GGUFWriter(tmp_path / "o.gguf", "other")
    writer.add_tensor("x", np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(RobuqFormatError, match=r"has no robuq.description"):
        read_gguf_codes(tmp_path / "o.gguf")


def test_bitnet_layout_is_what_transformers_unpacks(tmp_path):
    pytest.importorskip("transformers")
    from transformers.integrations.bitnet import pack_weights, unpack_weights

    model = small()
    path = export_bitnet(model, tmp_path / "m.safetensors")
    with safe_open(path, framework="pt") as file:
        for name in ("0", "2"):
            packed = file.get_tensor(f"{name}.weight")
            codes = model.get_submodule(name).codes()
            with torch.compiler.set_stance("force_eager"):  # it is compiled otherwise, which paths with spaces break
                assert torch.equal(unpack_weights(packed, torch.float32), codes.float())
            assert torch.equal(packed, pack_weights(codes.clone()))
            assert torch.equal(file.get_tensor(f"{name}.alpha"), model.get_submodule(name).alpha)
        assert json.loads(file.metadata()["robuq"])["plain"] == []
    with pytest.raises(ValueError, match="multiple of 4 outputs, got 6"):
        pack_bitnet(torch.zeros(6, 4, dtype=torch.int8))


def test_plain_layers_run_in_transformers_bitlinear(tmp_path):
    transformers = pytest.importorskip("transformers")
    from transformers.integrations.bitnet import BitLinear

    assert transformers is not None
    torch.manual_seed(0)
    config = RobuQConfig(granularity="tensor", rotation="none", rank=0, quantizer="absmax", act_bits=8)
    model = freeze(quantize(nn.Sequential(nn.Linear(64, 8)), config))
    path = export_bitnet(model, tmp_path / "m.safetensors")
    theirs = BitLinear(64, 8, True, dtype=torch.float32)
    with safe_open(path, framework="pt") as file:
        theirs.weight, theirs.weight_scale = file.get_tensor("0.weight"), file.get_tensor("0.weight_scale")
        theirs.bias = file.get_tensor("0.bias")
        assert json.loads(file.metadata()["robuq"])["plain"] == ["0"]
    x = torch.randn(3, 64)
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        assert torch.allclose(theirs(x), model(x), atol=1e-4)
