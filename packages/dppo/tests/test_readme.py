"""Every block of code in the README runs as written."""

import re
from pathlib import Path

import pytest
import torch

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


# What makes the example's run one of two small steps on a processor.
SMALL_RUN = (
    "per_device_train_batch_size=8, num_generations=4, max_completion_length=8, max_steps=2, use_cpu=True, bf16=False, "
    "report_to=[], disable_tqdm=True, save_strategy='no'"
)


def block(word: str) -> str:
    (found,) = [code for code in BLOCKS if word in code]
    return found


def run(code: str, namespace: dict) -> None:
    exec(code, namespace)  # noqa: S102 our own README


def test_trainer(tmp_path):
    pytest.importorskip("trl")
    import dppo_trl as small
    from trl import GRPOConfig, GRPOTrainer

    assert len(BLOCKS) == 5
    folder = tmp_path / "model"
    small.model().save_pretrained(folder)
    small.tokenizer().save_pretrained(folder)
    code = block("trainer.train()").replace("path/to/model", str(folder))
    code = code.replace('output_dir="run"', f"output_dir={str(tmp_path)!r}, {SMALL_RUN}")
    namespace = {"reward": small.reward, "dataset": small.prompts(8)}
    run(code, namespace)
    assert namespace["trainer"].state.global_step == 2
    assert namespace["trainer"].args.pack
    namespace |= {"MaxRLTrainer": GRPOTrainer, "MaxRLConfig": GRPOConfig}
    run(block("class Trainer(DynamicPruningMixin"), namespace)
    assert issubclass(namespace["Config"], namespace["DynamicPruningConfig"])


def test_any_other_loop_and_the_auditor():
    torch.manual_seed(0)
    texts, step = ["a?", "b?", "c?", "d?"], 3
    namespace = {
        "texts": texts, "step": step, "group_size": 8, "advantages": torch.randn(32),
        "mean_abs_advantage": [0.1, 0.2, 0.3, 0.4],
    }  # fmt: skip
    run(block("prune_prompts(texts"), namespace)
    assert namespace["prompts"].keep.all(), "nothing is known yet"
    assert 0 < int((~namespace["result"].keep).sum()) < 32
    history = namespace["history"]
    assert history.scores(texts).tolist() == [0.1, 0.2, 0.3, 0.4]
    model = torch.nn.Linear(3, 1)
    features, advantages = torch.randn(16, 3), torch.randn(16)

    def loss_of(rows):
        return -advantages[rows] * model(features[rows]).squeeze(1)

    namespace |= {"model": model, "A": advantages, "losses_of": loss_of}
    run(block("audit_unbiasedness"), namespace)
    assert namespace["report"].unbiased
    assert namespace["report"].exact


def test_packing():
    namespace = {"lengths": [1000, 3000, 96, 4096, 500]}
    run(block("pack_window"), namespace)
    packing = namespace["packing"]
    assert [row.tolist() for row in packing.rows] == [[0, 1, 2], [3], [4]]
    assert packing.density == pytest.approx(8692 / (3 * 4096))
