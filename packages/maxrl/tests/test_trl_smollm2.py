"""MaxRL on a real model: SmolLM2-135M-Instruct learns from sums it samples (slow: it trains 135 million weights)."""

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("peft")
from datasets import Dataset
from peft import LoraConfig

from icml26_shared import models
from icml26_shared.errors import UserError
from maxrl import MaxRLConfig, MaxRLTrainer, maxrl_advantages


@pytest.mark.slow
def test_a_few_steps_on_smollm2(tmp_path):
    try:
        model, tokenizer = models.load("smollm2", dtype=models.faster_dtype())
    except UserError as error:
        pytest.skip(str(error))

    def right(completions, answer, **_):
        return [float(a in c) for c, a in zip(completions, answer, strict=True)]

    sums = [(a, b) for a in range(1, 5) for b in range(1, 5)]
    data = {"prompt": [f"Sums: 1+1=2, 2+3=5, {a}+{b}=" for a, b in sums], "answer": [str(a + b) for a, b in sums]}
    args = MaxRLConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=4,
        max_steps=3,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        disable_tqdm=True,
        gradient_checkpointing=False,
    )
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = MaxRLTrainer(
        model=model,
        reward_funcs=right,
        args=args,
        train_dataset=Dataset.from_dict(data),
        processing_class=tokenizer,
        peft_config=lora,
    )
    trainer.train()
    assert trainer.state.global_step == 3
    log = [h for h in trainer.state.log_history if "maxrl/effective_order" in h]
    assert [float(h["maxrl/effective_order"]) for h in log] == [7, 7, 7]
    rewards = torch.tensor(list(trainer._logs["rewards"]["right"]))
    assert list(trainer._logs["advantages"]) == maxrl_advantages(rewards, group_size=8).tolist()
    assert 0 < sum(float(h["reward"]) for h in log) < 3  # it can add a little, and not always
    live = [h for h in log if float(h["maxrl/max_advantage"]) > 0]
    assert live
    assert all(float(h["grad_norm"]) > 0 for h in live)
    trained = [p for name, p in trainer.model.named_parameters() if "lora_B" in name]
    assert any(p.abs().max() > 0 for p in trained)
