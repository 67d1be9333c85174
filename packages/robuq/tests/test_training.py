"""QAT resumes to the same bits, and a killed run leaves a whole checkpoint."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from icml26_shared.checkpoint import CheckpointError
from robuq.config import RobuQConfig
from robuq.surgery import quantize
from robuq.training import QAT, QATConfig, distilled

CONFIG = QATConfig(steps=12, lr=1e-2, lr_warmup=3, ema=0.9, avg_bits=2, warm=5, save_every=4)


def make():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Dropout(0.1), nn.Linear(12, 3))
    return quantize(model, RobuQConfig(rank=2))


def loss(model, step):
    x = torch.randn(16, 6)
    return (model(x) - x[:, :3]).square().mean()


def calibrate():
    return [torch.randn(32, 6, generator=torch.Generator().manual_seed(3))], lambda model, batch: model(batch)


def state(training):
    parts = {**training.model.state_dict(), **{f"ema.{k}": v for k, v in training.ema.items()}}
    return {name: tensor.clone() for name, tensor in parts.items()}


@pytest.mark.parametrize("stop", [1, 4, 5, 7, 11])
def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path, stop):
    whole = QAT(make(), CONFIG, loss, calibrate=calibrate)
    whole.run()
    first = QAT(make(), CONFIG, loss, folder=tmp_path, calibrate=calibrate)
    first.run(until=stop)
    torch.manual_seed(999)  # whatever state the new process is in
    second = QAT(make(), CONFIG, loss, folder=tmp_path, calibrate=calibrate)
    second.run()
    expected, found = state(whole), state(second)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert second.plan == whole.plan
    assert [m.bits for m in (second.model[0], second.model[3])] == list(whole.plan.bits.values())
    assert second.plan.avg <= 2


def test_training_lowers_the_loss_and_rates_follow_the_schedule():
    losses = []
    QAT(make(), QATConfig(steps=60, lr=1e-2, lr_warmup=5, ema=0), loss, on_step=lambda s, v: losses.append(v)).run()
    assert sum(losses[-10:]) < 0.6 * sum(losses[:10])
    config = QATConfig(steps=1000, lr=1e-4)
    assert config.rate(0) == pytest.approx(1e-4 / 500)
    assert config.rate(499) == pytest.approx(1e-4)
    assert config.rate(750) == pytest.approx(1e-4 * 0.55)
    assert config.rate(1000) == pytest.approx(1e-5)


def test_ema_is_the_average():
    training = QAT(make(), QATConfig(steps=3, lr=1e-2, lr_warmup=0, ema=0.5), loss)
    expected = {n: p.detach().clone() for n, p in training.model.named_parameters()}
    for step in (1, 2, 3):
        training.run(until=step)
        for n, p in training.model.named_parameters():
            expected[n] = 0.5 * expected[n] + 0.5 * p.detach()
    training.load_ema()
    for n, p in training.model.named_parameters():
        assert torch.allclose(p, expected[n], atol=1e-6)


def test_other_settings_and_models_are_refused(tmp_path):
    QAT(make(), CONFIG, loss, folder=tmp_path, calibrate=calibrate).run(until=2)
    other = QATConfig(**{**CONFIG.__dict__, "lr": 0.5})
    with pytest.raises(CheckpointError, match=r"other settings \(lr\)"):
        QAT(make(), other, loss, folder=tmp_path, calibrate=calibrate).run()
    wrong = quantize(nn.Sequential(nn.Linear(6, 5)), RobuQConfig(rank=2))
    with pytest.raises(CheckpointError, match="is of another model"):
        QAT(wrong, CONFIG, loss, folder=tmp_path, calibrate=calibrate).run()
    with pytest.raises(ValueError, match="avg_bits needs calibrate"):
        QAT(make(), CONFIG, loss)
    with pytest.raises(ValueError, match="plan is made after 1000 steps, but there are 10"):
        QATConfig(steps=10, avg_bits=2)
    with pytest.raises(ValueError, match="nothing in this model is quantised"):
        QAT(nn.Linear(2, 2), QATConfig(steps=1), loss)


_SCRIPT = """
import sys
sys.path.insert(0, sys.argv[2])
import test_training as t
from robuq.training import QAT, QATConfig
config = QATConfig(**{**t.CONFIG.__dict__, "steps": 400, "save_every": 1})
print("ready", flush=True)
QAT(t.make(), config, t.loss, folder=sys.argv[1], calibrate=t.calibrate).run()
"""


def test_a_run_killed_while_it_writes_resumes_to_the_same_result(tmp_path):
    here = str(Path(__file__).parent)
    child = subprocess.Popen([sys.executable, "-c", _SCRIPT, str(tmp_path), here], stdout=subprocess.PIPE)
    child.stdout.readline()
    deadline = time.monotonic() + 60
    while not (tmp_path / "qat.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)  # it writes all the time: most likely it is writing now
    child.send_signal(signal.SIGKILL)
    child.wait()
    config = QATConfig(**{**CONFIG.__dict__, "steps": 400, "save_every": 1})
    training = QAT(make(), config, loss, folder=tmp_path, calibrate=calibrate)
    training.run(until=0)
    reached = training.step
    assert reached > 0
    training.config = QATConfig(**{**config.__dict__, "save_every": 10**6})
    training.path = None
    target = min(400, reached + 5)
    training.run(until=target)
    whole = QAT(make(), config, loss, calibrate=calibrate)
    whole.run(until=target)
    expected, found = state(whole), state(training)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_distillation():
    task, output, teacher = torch.tensor(2.0), torch.randn(3, 4, 5), torch.randn(3, 4, 5)
    assert distilled(task, output, teacher, 0.0) is task
    expected = 0.5 * 2 + 0.5 * (output - teacher).square().mean()
    assert torch.allclose(distilled(task, output, teacher, 0.5), expected)
    p, q = teacher.softmax(-1), output.softmax(-1)
    kl = (p * (p / q).log()).sum(-1).mean()
    assert torch.allclose(distilled(task, output, teacher, 1.0, "kl"), kl, atol=1e-6)
    with pytest.raises(ValueError, match=r"weight must be in \[0, 1\], got 2"):
        distilled(task, output, teacher, 2)
