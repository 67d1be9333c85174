"""The callback inside Hugging Face's Trainer."""

import json

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from icml26_shared import models
from layerwise_lr.integrations.transformers import LLRTrainerCallback, optimizer_cls_and_kwargs

STEPS, LR = 12, 1e-3


class Tokens(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = torch.randint(0, 256, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Recorder(TrainerCallback):
    """Rates after each step; added last, so after the controller's."""

    def __init__(self):
        self.rates, self.logs = {}, []

    def on_step_end(self, args, state, control, optimizer=None, **_):
        self.rates[state.global_step] = {g["name"]: (g["lr"], g["llr_ratio"]) for g in optimizer.param_groups}

    def on_log(self, args, state, control, logs=None, **_):
        self.logs.append(dict(logs))


def run(folder, *, resume=None, stop=STEPS, scheduler="linear", optimizer="adamw", **settings):
    model = models.tiny_llama(num_hidden_layers=1)
    args = TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        lr_scheduler_type=scheduler, warmup_steps=3, save_steps=stop, logging_steps=4, report_to=[], use_cpu=True,
        disable_tqdm=True, seed=0, save_strategy="steps",
    )  # fmt: skip
    callback, recorder = LLRTrainerCallback(interval=4, ramp=3, active_fraction=0.9, **settings), Recorder()
    trainer = Trainer(
        model=model, args=args, train_dataset=Tokens(), callbacks=[callback, recorder],
        optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(model, LR, optimizer),
    )  # fmt: skip
    if stop < STEPS:

        class Stop(TrainerCallback):
            def on_step_end(self, args, state, control, **_):
                control.should_training_stop = state.global_step >= stop

        trainer.add_callback(Stop())
    trainer.train(resume_from_checkpoint=resume)
    return model, callback, recorder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole"))


def test_rates_are_ratio_times_the_trainers_schedule(whole):
    _, callback, recorder = whole
    assert [entry["step"] for entry in callback.controller.history] == [1, 4, 8]
    for step, rates in recorder.rates.items():
        schedule = min(1.0, step / 3) if step < 3 else (STEPS - step) / (STEPS - 3)
        for name, (lr, ratio) in rates.items():
            assert lr == pytest.approx(ratio * LR * schedule, rel=1e-9, abs=1e-15), (step, name)
    last = recorder.rates[STEPS]
    assert last["model.embed_tokens"][1] == last["lm_head"][1] == 3
    assert {round(ratio, 9) for _, ratio in last.values()} > {1.0, 3.0}


def test_layers_are_logged(whole):
    _, callback, recorder = whole
    layer = "model.layers.0.self_attn.q_proj"
    logged = [logs for logs in recorder.logs if f"llr/alpha/{layer}" in logs]
    assert len(logged) >= 3
    assert logged[-1][f"llr/alpha/{layer}"] == callback.controller.alphas[layer]
    assert f"llr/lr/{layer}" in logged[-1]


@pytest.mark.parametrize("background", [False, True])
def test_resuming_in_a_ramp_is_the_same_run(whole, tmp_path, background):
    expected = run(tmp_path / "all", background=True) if background else whole
    run(tmp_path / "part", stop=5, background=background)
    kept = json.loads((tmp_path / "part" / "checkpoint-5" / "trainer_state.json").read_text())
    assert kept["stateful_callbacks"]["LLRTrainerCallback"]["attributes"]["saved"]["step"] == 5
    model, _, recorder = run(tmp_path / "part", resume=str(tmp_path / "part" / "checkpoint-5"), background=background)
    assert recorder.rates == {step: rates for step, rates in expected[2].rates.items() if step > 5}
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected[0].parameters(), strict=True))


def test_muon_in_the_trainer(tmp_path):
    _, callback, recorder = run(tmp_path, scheduler="constant", optimizer="muon")
    assert type(callback.controller.optimizer).__name__ == "MuonAdamW"
    assert recorder.rates[STEPS]["lm_head"][0] == pytest.approx(3 * LR)


def test_the_trainers_own_groups_are_refused_with_what_to_do(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True)
    trainer = Trainer(
        model=models.tiny_llama(num_hidden_layers=1),
        args=args,
        train_dataset=Tokens(),
        callbacks=[LLRTrainerCallback()],
    )
    with pytest.raises(ValueError, match=r"one group has one rate\. Build the optimizer from"):
        trainer.train()
