"""The callback inside Lightning."""

import warnings

import pytest
import torch
from torch.optim import AdamW

pl = pytest.importorskip("lightning.pytorch")

from layerwise_lr import LLRLightningCallback, param_groups  # noqa: E402

STEPS = 10


@pytest.fixture
def fit(make_model, tmp_path):
    """Trains for STEPS optimizer steps and returns module, callback, rates after each, and the trainer."""

    logged = {}

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = make_model()

        def training_step(self, batch, index):
            return torch.nn.functional.cross_entropy(self.model(batch).flatten(0, 1), batch.flatten())

        def configure_optimizers(self):
            optimizer = AdamW(param_groups(self, 1e-3))
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    class Memory(pl.loggers.logger.DummyLogger):
        def log_metrics(self, metrics, step=None):
            logged[step] = metrics

    class Recorder(pl.Callback):
        def __init__(self):
            self.rates = {}

        def on_train_batch_end(self, trainer, module, *_):
            groups = trainer.optimizers[0].param_groups
            self.rates[trainer.global_step] = {g["name"]: (g["lr"], g["llr_ratio"]) for g in groups}

    def run(steps=STEPS, resume=None, accumulate=2):
        # one batch again and again: Lightning does not say which batch a resumed epoch begins with
        data = [torch.randint(0, 100, (4, 8), generator=torch.Generator().manual_seed(0))] * (2 * STEPS)
        callback, recorder = (
            LLRLightningCallback(interval=4, ramp=3, active_fraction=0.9, total_steps=STEPS),
            Recorder(),
        )
        module = Module()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = pl.Trainer(
                max_steps=steps, accumulate_grad_batches=accumulate, callbacks=[callback, recorder],
                logger=Memory(), log_every_n_steps=2,
                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
                default_root_dir=tmp_path,
            )  # fmt: skip
            loader = torch.utils.data.DataLoader(data, batch_size=None)
            trainer.fit(module, loader, ckpt_path=resume, weights_only=False) if resume else trainer.fit(module, loader)
        trainer.logged = logged
        return module, callback, recorder.rates, trainer

    return run


def test_rates_are_ratio_times_the_schedule(fit):
    _, callback, rates, trainer = fit()
    assert callback.controller.step_count == STEPS
    assert trainer.logged[10]["llr/lr/model.embed"] == rates[10]["model.embed"][0]
    assert trainer.logged[10]["llr/alpha/model.layers.0.mix"] == callback.controller.alphas["model.layers.0.mix"]
    assert [entry["step"] for entry in callback.controller.history] == [1, 4, 8]
    for step in range(1, STEPS + 1):
        for lr, ratio in rates[step].values():
            assert lr == pytest.approx(ratio * 1e-3 * 0.9**step)
    assert rates[STEPS]["model.embed"][1] > 2


def test_resuming_in_a_ramp_is_the_same_run(fit, tmp_path):
    whole, _, expected, _ = fit()
    _, _, _, trainer = fit(steps=5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.save_checkpoint(tmp_path / "part.ckpt")
    module, callback, rates, _ = fit(resume=tmp_path / "part.ckpt")
    assert callback.controller.step_count == STEPS
    assert {s: r for s, r in rates.items() if s > 5} == {s: r for s, r in expected.items() if s > 5}
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), whole.parameters(), strict=True))
