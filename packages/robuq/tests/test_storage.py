"""Saved models read back equal; damaged ones are refused with the key named."""

import copy
import json
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import robuq
from robuq.config import RobuQConfig
from robuq.errors import RobuqFormatError
from robuq.eval.tiny_dit import TinyDiT
from robuq.packed import PackedLinear
from robuq.storage import load_model, meta_parameters, save_model
from robuq.streaming import quantize_checkpoint
from robuq.surgery import dequantize, freeze, packed_bytes, quantised_names, quantize


def dit(seed=0):
    torch.manual_seed(seed)
    model = TinyDiT(depth=1)
    for p in model.parameters():  # adaLN-Zero starts at zero, where nothing could differ
        if not p.any():
            nn.init.normal_(p, std=0.1)
    return model.eval()


def batch():
    g = torch.Generator().manual_seed(5)
    return torch.randn(3, 1, 8, 8, generator=g), torch.tensor([1, 500, 999]), torch.tensor([0, 3, 10])


def quantised(**settings):
    return quantize(dit(), RobuQConfig.for_dit(rank=4, **settings))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "model"
    model = quantised()
    model.blocks[0].attn.qkv.bits = 2
    save_model(model, folder)
    return model, folder


def test_round_trip(saved):
    model, folder = saved
    loaded = load_model(folder, lambda: TinyDiT(depth=1))
    frozen = freeze(copy.deepcopy(model))
    assert torch.equal(loaded(*batch()), frozen(*batch()))
    assert loaded.blocks[0].attn.qkv.bits == 2
    assert {n for n, m in loaded.named_modules() if isinstance(m, PackedLinear)} == set(quantised_names(model))
    assert torch.equal(robuq.load_pretrained(folder, lambda: TinyDiT(depth=1))(*batch()), loaded(*batch()))
    again = folder.parent / "again"
    save_model(loaded, again)
    assert torch.equal(load_model(again, lambda: TinyDiT(depth=1))(*batch()), loaded(*batch()))


def test_what_is_quantised_in_a_dit(saved):
    model, _ = saved
    names = [f"blocks.0.{n}" for n in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2", "adaLN_modulation.1")]
    assert sorted(quantised_names(model)) == sorted(names)
    assert model.blocks[0].adaLN_modulation[1].bits == 4
    assert model.robuq_attention.bits == 8


def test_shards(saved):
    model, folder = saved
    sharded = folder.parent / "sharded"
    save_model(model, sharded, shard_bytes=20000)
    assert len(list(sharded.glob("model-*.safetensors"))) > 1
    whole, parts = (load_model(f, lambda: TinyDiT(depth=1)) for f in (folder, sharded))
    assert torch.equal(parts(*batch()), whole(*batch()))
    index = sharded / "model.safetensors.index.json"
    told = json.loads(index.read_text())
    key = next(iter(told["weight_map"]))
    told["weight_map"][key] = "../other.safetensors"
    index.write_text(json.dumps(told))
    with pytest.raises(RobuqFormatError, match="files lie in the folder itself"):
        load_model(sharded, lambda: TinyDiT(depth=1))


def damaged(folder, tmp_path, change):
    """A copy of a saved model whose tensors went through ``change``."""
    target = tmp_path / "damaged"
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


QKV = "blocks.0.attn.qkv"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{QKV}.alpha"), r"blocks.0.attn.qkv.alpha is missing"),
        (lambda t: t.update(extra=torch.ones(1)), r"extra is not part of this model"),
        (lambda t: t.update({f"{QKV}.alpha": torch.ones(3)}), r"qkv.alpha has shape \(3,\), the model has \(192,\)"),
        (lambda t: t[f"{QKV}.qweight"][0].fill_(0xFF), r"qkv.qweight has the code 3"),
        (lambda t: t[f"{QKV}.rowsum"].add_(1), r"qkv.rowsum does not agree"),
        (lambda t: t.update({f"{QKV}.alpha": t[f"{QKV}.alpha"].half()}), r"qkv.alpha is torch.float16"),
        (lambda t: t.pop("pos_embed"), r"pos_embed is missing"),
    ],
)
def test_damaged_tensors_are_named(saved, tmp_path, change, message):
    folder = damaged(saved[1], tmp_path, change)
    with pytest.raises(RobuqFormatError, match=message):
        load_model(folder, lambda: TinyDiT(depth=1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(version=2), "version is 2, this release reads 1"),
        (lambda d: d.update(format="other"), "format is not 'robuq'"),
        (lambda d: d["canary"].update(bytes="6290"), "canary does not unpack"),
        (lambda d: d.pop("layers"), "layers is missing"),
        (lambda d: d["layers"].update(nothing=next(iter(d["layers"].values()))), "nothing is no linear layer"),
        (lambda d: d["layers"][QKV].update(out_features=8), "qkv has shape"),
        (lambda d: d["layers"][QKV].pop("bits"), "is damaged"),
        (lambda d: d["layers"][QKV].update(bits=77), "is damaged"),
    ],
)
def test_damaged_descriptions_are_named(saved, tmp_path, change, message):
    folder = tmp_path / "damaged"
    shutil.copytree(saved[1], folder)
    told = json.loads((folder / "robuq.json").read_text())
    change(told)
    (folder / "robuq.json").write_text(json.dumps(told))
    with pytest.raises(RobuqFormatError, match=message):
        load_model(folder, lambda: TinyDiT(depth=1))


def test_cut_files_and_missing_parts(saved, tmp_path):
    folder = tmp_path / "cut"
    shutil.copytree(saved[1], folder)
    whole = (folder / "model.safetensors").read_bytes()
    for length in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        (folder / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(RobuqFormatError, match="damaged or cut short"):
            load_model(folder, lambda: TinyDiT(depth=1))
    (folder / "robuq.json").write_text('{"format": "rob')
    with pytest.raises(RobuqFormatError, match="is damaged"):
        load_model(folder, lambda: TinyDiT(depth=1))
    (folder / "robuq.json").unlink()
    with pytest.raises(RobuqFormatError, match="not a model that robuq saved"):
        load_model(folder, lambda: TinyDiT(depth=1))
    with pytest.raises(FileNotFoundError):
        load_model(tmp_path / "nowhere", lambda: TinyDiT(depth=1))
    with pytest.raises(ValueError, match="nothing in this model is quantised"):
        save_model(dit(), tmp_path / "x")


def test_another_model_is_refused(saved):
    with pytest.raises(RobuqFormatError, match="is no linear layer of this model"):
        load_model(saved[1], lambda: nn.Sequential(nn.Linear(2, 2)))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.body = nn.Linear(8, 8)
        self.twin = self.body
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.twin(self.body(self.embed(ids))))


def test_tied_heads_and_shared_modules(tmp_path):
    torch.manual_seed(0)
    model = Tied()
    with pytest.warns(UserWarning, match="head shares its weight with embed"):
        quantize(model, RobuQConfig(rank=2))
    assert model.twin is model.body
    assert model.head.weight is model.embed.weight
    save_model(model, tmp_path)
    loaded = load_model(tmp_path, Tied)
    assert loaded.twin is loaded.body
    assert loaded.head.weight is loaded.embed.weight
    ids = torch.arange(10)
    assert torch.equal(loaded(ids), freeze(model)(ids))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        untied = quantize(Tied(), RobuQConfig(rank=2, untie=True))
    assert type(untied.head).__name__ == "RobuQLinear"


def test_quantize_is_idempotent_and_keeps_flags():
    model = quantised()
    before = dict(model.named_modules())
    quantize(model, RobuQConfig.for_dit())
    assert dict(model.named_modules()) == before
    frozen_linear = nn.Linear(4, 4)
    frozen_linear.weight.requires_grad_(False)
    layer = quantize(frozen_linear, RobuQConfig(rank=1))
    assert not layer.weight_rot.requires_grad
    assert layer.bias.requires_grad
    attention = nn.MultiheadAttention(8, 2)
    quantize(attention, RobuQConfig())
    assert attention(torch.ones(2, 1, 8), torch.ones(2, 1, 8), torch.ones(2, 1, 8))[0].shape == (2, 1, 8)


def test_unknown_bits_mapping_names_the_layer():
    with pytest.raises(ValueError, match=r"no entry for the layer '1'; add it, or the pattern '\*'"):
        quantize(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), RobuQConfig(act_bits={"0": 2}))


def test_config_survives_json():
    config = RobuQConfig.for_dit(act_bits={"*fc1": 3, "*": 2}, rank=0)
    assert RobuQConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    with pytest.raises(ValueError, match="unknown setting"):
        RobuQConfig.from_json({"act_bit": 3})
    with pytest.raises(ValueError, match="rank must be a whole number"):
        RobuQConfig(rank=-1)
    with pytest.raises(ValueError, match="quantizer must be one of"):
        RobuQConfig(quantizer="gauss")


@pytest.mark.parametrize("form", ["safetensors", "pt", "ema.pt"])
def test_streaming_equals_quantising_in_memory(tmp_path, form):
    model = dit()
    if form == "safetensors":
        path = tmp_path / "w.safetensors"
        save_file(model.state_dict(), path)
    else:
        path = tmp_path / "DiT.pt"
        state = model.state_dict()
        torch.save({"ema": state, "opt": {}} if form == "ema.pt" else state, path)
    config = RobuQConfig.for_dit(rank=4)
    streamed = quantize_checkpoint(path, config, lambda: TinyDiT(depth=1))
    expected = freeze(quantize(dit(), config))
    assert torch.equal(streamed(*batch()), expected(*batch()))
    assert all(p.device.type == "cpu" for p in streamed.parameters())
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(RobuqFormatError):
        quantize_checkpoint(path, config, lambda: TinyDiT(depth=1))


def test_skeletons_hold_no_weights():
    with meta_parameters():
        model = Tied()
    assert all(p.device.type == "meta" for p in model.parameters())
    assert model.head.weight is model.embed.weight


def test_dequantised_model_has_plain_layers(saved):
    model = dequantize(copy.deepcopy(saved[0]))
    assert type(model.blocks[0].attn.qkv) is nn.Linear
    expected = saved[0].blocks[0].mlp.fc1.weight
    assert torch.allclose(model.blocks[0].mlp.fc1.weight, expected, atol=1e-6)


def test_bytes_of_a_packed_model_are_those_of_its_file(saved):
    _, folder = saved
    loaded = load_model(folder, lambda: TinyDiT(depth=1))
    assert packed_bytes(loaded) <= (folder / "model.safetensors").stat().st_size
