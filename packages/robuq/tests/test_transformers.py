"""Inside transformers: AutoModel.from_pretrained, Trainer, Conv1D, tied heads."""

import json

import pytest
import torch

transformers = pytest.importorskip("transformers")

import robuq  # noqa: E402
from icml26_shared.models import tiny  # noqa: E402
from robuq.config import RobuQConfig  # noqa: E402
from robuq.errors import RobuqFormatError  # noqa: E402
from robuq.integrations.transformers import RobuQTrainerCallback  # noqa: E402
from robuq.packed import PackedLinear  # noqa: E402
from robuq.surgery import freeze, quantised_names, quantize  # noqa: E402

IDS = torch.arange(24).reshape(2, 12)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    model = tiny("llama", num_hidden_layers=1)
    model.save_pretrained(folder / "fp")
    quantize(model, RobuQConfig.for_llm(rank=2, act_bits=3, attn_bits=8))
    freeze(model)
    robuq.save_pretrained(model, folder / "packed")
    return model, folder


def test_auto_model_loads_a_saved_folder(saved):
    model, folder = saved
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "packed")
    assert type(loaded) is type(model)
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    layer = loaded.model.layers[0].mlp.down_proj
    assert isinstance(layer, PackedLinear)
    assert (layer.bits, layer.qweight.dtype, layer.A.dtype) == (3, torch.uint8, torch.bfloat16)
    assert "lm_head" not in quantised_names(loaded)


def test_auto_model_in_bfloat16_keeps_the_scales(saved):
    model, folder = saved
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "packed", dtype=torch.bfloat16)
    layer, original = loaded.model.layers[0].mlp.down_proj, model.model.layers[0].mlp.down_proj
    assert layer.alpha.dtype == torch.float32
    assert torch.equal(layer.alpha, original.alpha)


def test_saved_again_by_transformers(saved, tmp_path):
    model, folder = saved
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "packed")
    loaded.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_another_version_is_refused(saved, tmp_path):
    import shutil

    shutil.copytree(saved[1] / "packed", tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["quantization_config"]["version"] = 9
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(RobuqFormatError, match="version is 9"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")


def test_streaming_from_a_folder(saved):
    model, folder = saved
    config = RobuQConfig.for_llm(rank=2, act_bits=3, attn_bits=8)
    streamed = robuq.from_pretrained(folder / "fp", config)
    with torch.no_grad():
        assert torch.equal(streamed(IDS).logits, model(IDS).logits)
    loaded = robuq.load_pretrained(folder / "packed")
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)


def test_conv1d_of_gpt2_is_transposed():
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=32)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        exact = model(IDS).logits
        quantize(model, RobuQConfig.for_llm(act_bits=16, rank=32))
        names = quantised_names(model)
        assert "transformer.h.0.attn.c_attn" in names
        assert model.transformer.h[0].attn.c_attn.in_features == 32
        found = model(IDS).logits
    # rank 32 is full rank: the branch makes up for all that ternary weights leave out, up to bfloat16
    assert float((found - exact).abs().max() / exact.abs().max()) < 0.02


def test_trainer_callback_plans_and_packs(tmp_path):
    model = tiny("llama", num_hidden_layers=1)
    quantize(model, RobuQConfig.for_llm(rank=2, gain="mse", weight_scale="absmean", weight_gain=None))
    rows = [{"input_ids": (IDS[0] + i) % 200, "labels": (IDS[0] + i) % 200} for i in range(16)]
    callback = RobuQTrainerCallback(2.0, [{"input_ids": IDS}], warm=2, freeze_to=tmp_path / "packed")
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "run"), max_steps=4, per_device_train_batch_size=4, report_to=[], use_cpu=True,
        disable_tqdm=True, save_strategy="no", logging_strategy="no",
    )  # fmt: skip
    transformers.Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[callback]).train()
    plan = callback.schedule.plan
    assert plan.avg <= 2
    assert set(plan.bits) == set(quantised_names(model))
    assert all(isinstance(model.get_submodule(name), PackedLinear) for name in plan.bits)
    assert json.loads((tmp_path / "run" / "robuq_plan.json").read_text())["bits"] == plan.bits
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, model.eval()(IDS).logits)


def test_callback_refuses_a_model_that_is_not_quantised(tmp_path):
    callback = RobuQTrainerCallback(2.0, [], warm=1)
    with pytest.raises(ValueError, match="nothing in this model is quantised"):
        callback.schedule.begin(tiny("llama", num_hidden_layers=1), 0, tmp_path)
