"""Training the cores alone inside Lightning's own trainer."""

import pytest
import torch

pytest.importorskip("lightning")

from lightning.pytorch import LightningModule, Trainer

from tucker_attention import TuckerAttention, TuckerConfig
from tucker_attention.integrations.adapters import load_cores
from tucker_attention.integrations.lightning import TrainCores


class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attn = TuckerAttention(TuckerConfig(16, 4, ranks=(2, 8, 4)))
        self.losses = []

    def training_step(self, batch, index):
        loss = (self.attn(batch) - batch.flip(1)).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.02)


def fit(model, *callbacks):
    x = torch.randn(4, 5, 16, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(x, batch_size=4)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    Trainer(max_epochs=30, callbacks=list(callbacks), enable_model_summary=False, **quiet).fit(model, loader)


def test_only_cores_are_trained_and_written(tmp_path):
    model, base = Regression(), Regression()
    callback = TrainCores(tmp_path / "cores.safetensors", head_factors=False)
    fit(model, callback)
    assert callback.trainable == ["attn.C", "attn.Ct"]
    assert model.losses[-1] < model.losses[0]
    changed = {
        n for (n, p), q in zip(model.named_parameters(), base.parameters(), strict=True) if not torch.equal(p, q)
    }
    assert changed == {"attn.C", "attn.Ct"}
    load_cores(base, tmp_path / "cores.safetensors")
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), base.parameters(), strict=True))


def test_a_module_without_tucker_layers_is_refused():
    model = Regression()
    model.attn = torch.nn.Linear(16, 16)
    with pytest.raises(ValueError, match="Regression has no Tucker layer"):
        fit(model, TrainCores())
