"""Adapters of PEFT on the cores: what is trained, saved, loaded and merged is PEFT's own doing."""

import warnings

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft

from icml26_shared import models
from tucker_attention import convert_model
from tucker_attention.integrations.peft import cores_config


def small(family, **options):
    model = models.tiny("gpt2", n_positions=64, n_embd=32, n_layer=2, n_head=4, hidden_size=32)
    if family == "llama":
        model = models.tiny_llama()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return convert_model(model, **options)


CASES = {
    "dense": ("gpt2", {"ranks": (3, 12, 6)}, {"C", "Ct"}),
    "per head": (
        "gpt2",
        {"ranks": (4, 12, 6), "core": "per_head"},
        {"query_map", "key_map", "value_map", "output_map"},
    ),
    "latent RoPE": ("llama", {"ranks": (3, 12, 6), "rope": "latent"}, {"C", "Ct"}),
}


@pytest.mark.parametrize("case", CASES)
def test_cores_are_adapted_saved_and_loaded(case, tmp_path):
    family, options, cores = CASES[case]
    base = small(family, **options)
    state = {name: p.detach().clone() for name, p in base.state_dict().items()}
    ids = torch.randint(3, 250, (2, 9), generator=torch.Generator().manual_seed(0))
    before = base(input_ids=ids).logits.detach()
    config = cores_config(base, r=2)
    held = {name.rpartition(".")[2] for name in config.target_parameters}
    assert held <= cores
    assert len(held) >= 2
    model = peft.get_peft_model(base, config)
    assert torch.equal(model(input_ids=ids).logits, before)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trainable, lr=0.02)
    losses = []
    for _ in range(5):
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    model.eval()
    wanted = model(input_ids=ids).logits
    assert (wanted - before).abs().max() > 1e-3
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < 200_000
    again = small(family, **options)
    again.load_state_dict(state)
    loaded = peft.PeftModel.from_pretrained(again, tmp_path).eval()
    assert torch.allclose(loaded(input_ids=ids).logits, wanted, atol=1e-6)
    merged = loaded.merge_and_unload()
    assert torch.allclose(merged(input_ids=ids).logits, wanted, atol=1e-4)
    assert {name for name, p in merged.named_parameters() if not torch.equal(p, state[name])} <= {
        name for name in state if name.rpartition(".")[2] in held
    }


def test_what_does_not_fit_is_refused():
    plain = models.tiny("gpt2", n_positions=64, n_embd=32, n_layer=2, n_head=4, hidden_size=32)
    with pytest.raises(ValueError, match="has no Tucker layer"):
        cores_config(plain)
    with pytest.raises(ValueError, match="the cores of GPT2LMHeadModel are blocks of the identity"):
        cores_config(convert_model(plain))  # exact: the factors are the model's own matrices
    with pytest.raises(ValueError, match="chooses the targets itself; leave out target_modules"):
        cores_config(plain, target_modules=["c_attn"])
