"""Which weights are matrices: names, roles, ties, wrappers, LoRA, what cannot be read; groups and Muon."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from layerwise_lr import LayerwiseLR, MuonAdamW, param_groups
from layerwise_lr.layers import block_of, clean_name, matrices, role_by_name


def roles(model):
    return {layer.name: layer.role for layer in matrices(model)}


def test_roles(model):
    assert roles(model) == {
        "embed": "embedding",
        **{f"layers.{i}.{part}": "matrix" for i in (0, 1) for part in ("mix", "up", "down")},
        "head": "head",
    }


def test_tied_weights_are_one_matrix(model):
    model.head.weight = model.embed.weight
    assert "head" not in roles(model)
    assert roles(model)["embed"] == "embedding"
    model.layers[1].up.weight = model.layers[0].up.weight
    assert "layers.1.up" not in roles(model)
    groups = param_groups(model, 1e-3)
    ids = [id(p) for group in groups for p in group["params"]]
    assert len(ids) == len(set(ids)) == len({id(p) for p in model.parameters()})
    controller = LayerwiseLR(SGD(groups), model, total_steps=10, ramp=0)
    controller.step()
    assert controller.ratios["embed"] == 3


def test_wrappers_leave_names_and_ratios_alone(make_model):
    found = []
    for wrap in (lambda m: m, lambda m: torch.compile(m, backend="eager"), lambda m: nn.ModuleDict({"module": m})):
        model = wrap(make_model())
        controller = LayerwiseLR(SGD(param_groups(model, 1e-3)), model, total_steps=10, ramp=0)
        controller.step()
        found.append(controller.ratios)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("_orig_mod.layers.0._orig_mod.up.weight", "layers.0.up"),
        ("module.module.a.weight", "a"),
        ("a._fsdp_wrapped_module.b.bias", "a.b.bias"),
        ("my_module.weight", "my_module"),
        ("weight", "weight"),
    ],
)
def test_clean_names(name, clean):
    assert clean_name(name) == clean


def test_blocks_and_roles_by_name():
    assert block_of("model.layers.3.self_attn.q_proj") == "model.layers.3"
    assert block_of("head") == ""
    assert (
        role_by_name("model.embed_tokens")
        == role_by_name("transformer.wte")
        == role_by_name("token_embd")
        == "embedding"
    )
    assert role_by_name("lm_head") == role_by_name("output") == "head"
    assert role_by_name("blk.0.attn_output") == role_by_name("model.layers.0.self_attn.o_proj") == "matrix"


def test_convolutions_gpt2_layers_and_parametrised_weights():
    class Conv1D(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 80))

    model = nn.ModuleDict(
        {
            "conv": nn.Conv2d(60, 70, 3),
            "gpt": Conv1D(),
            "norm": nn.utils.parametrizations.weight_norm(nn.Linear(64, 70)),
        }
    )
    assert roles(model) == {"conv": "matrix", "gpt": "matrix", "norm": "matrix"}
    controller = LayerwiseLR(SGD(param_groups(model, 1e-3)), model, total_steps=10, ramp=0)
    controller.step()
    assert controller.alphas.keys() == roles(model).keys()
    by_name = {group["name"]: group["lr"] for group in controller.optimizer.param_groups}
    assert by_name["norm.original0"] == by_name["norm.original1"] == 1e-3 * controller.ratios["norm"]
    assert controller.reports["conv"].shape == (70, 60, 3, 3)


def test_what_cannot_be_read_is_skipped_with_a_reason(model):
    with torch.device("meta"):
        model.ghost = nn.Linear(64, 64)
    model.bytes = nn.Linear(64, 64)
    model.bytes.weight = nn.Parameter(torch.zeros(64, 64, dtype=torch.int8), requires_grad=False)
    model.flat = nn.Linear(64, 64)
    model.flat.weight = nn.Parameter(torch.randn(4096))
    skips = {layer.name: layer.skip for layer in matrices(model) if layer.skip}
    assert skips["ghost"] == "on the meta device, without values"
    assert skips["bytes"] == "stored as torch.int8: dequantise it first"
    assert skips["flat"] == "sharded or flattened, shape (4096,): pass gather="
    controller = LayerwiseLR(SGD(param_groups(model, 1e-3)), model, total_steps=10)
    with pytest.warns(match="flat keeps the base rate: sharded"):
        controller.step()
    gathered = {each.name: each for each in matrices(model, gather=lambda p: p.reshape(64, 64) if p.dim() == 1 else p)}
    assert gathered["flat"].skip == ""
    assert gathered["flat"].read().shape == (64, 64)


def test_every_trainable_parameter_is_in_one_group(model):
    model.layers[0].up.weight.requires_grad_(False)
    groups = param_groups(model, 1e-3, weight_decay=0.2)
    ids = [id(p) for group in groups for p in group["params"]]
    assert sorted(ids) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert decay[id(model.layers[0].norm.weight)] == decay[id(model.layers[0].down.bias)] == 0
    assert decay[id(model.embed.weight)] == 0.2
    assert {g["weight_decay"] for g in param_groups(model, 1e-3, weight_decay=0.2, decay_norm_bias=True)} == {0.2}


def test_bad_group_arguments(model):
    with pytest.raises(ValueError, match="unknown optimizer 'sgd'; choose from adamw, muon"):
        param_groups(model, 1e-3, "sgd")
    with pytest.raises(ValueError, match="rates must be positive, got lr = 0"):
        param_groups(model, 0)
    with pytest.raises(ValueError, match="weight_decay must not be negative"):
        param_groups(model, 1e-3, weight_decay=-1)
    with pytest.raises(ValueError, match="has no trainable parameter"):
        param_groups(model.requires_grad_(False), 1e-3)
    with pytest.raises(ValueError, match="unknown lora 'sum'"):
        matrices(model, lora="sum")


def lora_model(make_model, rank=8):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=rank, target_modules=["up", "down"], init_lora_weights=False)
    return peft.inject_adapter_in_model(config, make_model())


def test_lora_is_measured_merged_and_governs_both_factors(make_model):
    model = lora_model(make_model)
    controller = LayerwiseLR(AdamW(param_groups(model, 1e-3)), model, total_steps=10, ramp=0)
    controller.step()
    assert set(controller.alphas) == {f"layers.{i}.{part}" for i in (0, 1) for part in ("up", "down")}
    layer = model.layers[0].up
    merged = (
        layer.base_layer.weight
        + layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    )
    from layerwise_lr import fit_tail, spectrum

    assert controller.alphas["layers.0.up"] == pytest.approx(fit_tail(spectrum(merged)).alpha, rel=1e-6)
    rates = {group["name"]: group["lr"] for group in controller.optimizer.param_groups}
    expected = 1e-3 * controller.ratios["layers.0.up"]
    assert rates["layers.0.up.lora_A.default"] == rates["layers.0.up.lora_B.default"] == expected


def test_lora_product_alone_has_half_rank(make_model):
    model = lora_model(make_model)
    controller = LayerwiseLR(AdamW(param_groups(model, 1e-3, lora="ba")), model, total_steps=10, lora="ba")
    with pytest.warns(match="rank at most"):
        controller.step()
    assert set(controller.ratios.values()) == {1.0}


# -- Muon --------------------------------------------------------------------------------------------------------------


def test_muon_takes_matrices_and_adamw_the_rest(model, train_step):
    groups = param_groups(model, 1e-3, "muon", muon_lr=2e-2)
    optimizer = MuonAdamW(groups)
    assert {g["name"] for g in optimizer.param_groups if g["use_muon"]} == {
        f"layers.{i}.{part}" for i in (0, 1) for part in ("mix", "up", "down")
    }
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    controller = LayerwiseLR(optimizer, model, scheduler, total_steps=100, ramp=0)
    for step in range(3):
        train_step(model, optimizer, step)
        scheduler.step()
        controller.step()
    rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
    assert rates["embed"] == rates["head"] == pytest.approx(3 * 1e-3 * 0.9**3)
    assert rates["norms and biases"] == pytest.approx(1e-3 * 0.9**3)
    assert rates["layers.1.up"] == pytest.approx(2e-2 * 0.9**3 * controller.ratios["layers.1.up"])
    assert len(optimizer.state) == len(list(model.parameters()))


def test_muon_step_by_hand(make_model, train_step):
    """One group under torch's own Muon, the others under torch's own AdamW, give the same weights."""
    ours, theirs = make_model(), make_model()
    optimizer = MuonAdamW(param_groups(ours, 1e-3, "muon", weight_decay=0.1), betas=(0.9, 0.95))
    split = param_groups(theirs, 1e-3, "muon", weight_decay=0.1)
    chosen, rest = (
        [{k: v for k, v in g.items() if k in ("params", "lr", "weight_decay")} for g in split if g["use_muon"] is flag]
        for flag in (True, False)
    )
    muon = torch.optim.Muon(chosen, adjust_lr_fn="original")
    adamw = AdamW(rest, betas=(0.9, 0.95))
    for step in range(3):
        train_step(ours, optimizer, step)
        adamw.zero_grad()
        train_step(theirs, muon, step)
        adamw.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_muon_resumes_to_the_same_weights(make_model, train_step):
    whole, half = make_model(), make_model()
    first = MuonAdamW(param_groups(whole, 1e-3, "muon"))
    for step in range(4):
        train_step(whole, first, step)
        if step == 1:
            half.load_state_dict(whole.state_dict())
            second = MuonAdamW(param_groups(half, 1e-3, "muon"))
            second.load_state_dict(copy.deepcopy(first.state_dict()))
    for step in (2, 3):
        train_step(half, second, step)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), half.parameters(), strict=True))


def test_muon_refuses_what_it_cannot_take(model):
    with pytest.raises(ValueError, match="no group has use_muon=True"):
        MuonAdamW(param_groups(model, 1e-3))
    with pytest.raises(ValueError, match=r"'conv' has shapes \[\(2, 2, 1\)\]"):
        MuonAdamW([{"params": [nn.Parameter(torch.ones(2, 2, 1))], "name": "conv", "use_muon": True}])
