"""A tiny real TRL set-up on the CPU: a two-layer Llama, a word-level tokenizer, sums as prompts, scripted rollouts."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from icml26_shared.tiny_models import tiny_llama
from maxrl import MaxRLConfig, MaxRLTrainer

WORDS = ["<pad>", "<bos>", "<eos>", "<unk>", *map(str, range(10)), "+", "="]


def tokenizer():
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **names)


def digit_reward(prompts, completions, **_):
    """1 when the first word is below 4."""
    return [float(c.split()[0] < "4") if c.split() else 0.0 for c in completions]


def dataset(rows=8):
    return Dataset.from_dict({"prompt": [f"{i} + {i} =" for i in range(rows)]})


def config(out, **changes):
    settings = {
        "output_dir": str(out),
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 3,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
    }
    kind = changes.pop("kind", MaxRLConfig)
    return kind(**{**settings, **changes})


def model(**overrides):
    tiny = tiny_llama(vocab_size=len(WORDS), eos_token_id=2, bos_token_id=1, pad_token_id=0, **overrides)
    tiny.generation_config.eos_token_id = 2
    return tiny


def trainer(out, *, kind=MaxRLTrainer, reward=digit_reward, policy=None, rollout=None, evaluation=None, **changes):
    torch.manual_seed(0)
    return kind(
        model=policy if policy is not None else model(),
        reward_funcs=reward,
        args=config(out, **changes),
        train_dataset=dataset(),
        eval_dataset=evaluation,
        processing_class=tokenizer(),
        rollout_func=rollout,
    )


def scripted_rollout(prompts, trainer):
    """Completions that depend on the prompt and the place in the whole batch only, whatever the number of processes."""
    first = trainer.accelerator.process_index * len(prompts)
    words = tokenizer()
    completions = []
    for place, prompt in enumerate(prompts, first):
        digit = int(prompt.split()[0])
        length = 1 + (3 * place + digit) % 5
        completions.append([4 + (7 * place + 3 * digit + step) % 10 for step in range(length)])
    return {"prompt_ids": [words(p)["input_ids"] for p in prompts], "completion_ids": completions, "logprobs": None}


def watch(trainer):
    """Keep every batch that `_generate_and_score_completions` returns and every one the loss is called with."""
    scored, losses = [], []
    score, loss = trainer._generate_and_score_completions, trainer._compute_loss

    def keep_score(inputs):
        batch = score(inputs)
        scored.append((trainer.model.training, {k: v.clone() for k, v in batch.items() if v is not None}))
        return batch

    def keep_loss(model, inputs):
        losses.append({k: v.clone() for k, v in inputs.items() if v is not None})
        return loss(model, inputs)

    trainer._generate_and_score_completions, trainer._compute_loss = keep_score, keep_loss
    return scored, losses


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def logged(trainer, name):
    return [float(h[name]) for h in trainer.state.log_history if name in h]


def scored_batch(trainer):
    trainer.model.train()
    rows = [row for row in dataset(2) for _ in range(4)]
    batch = trainer._generate_and_score_completions(rows)
    batch["advantages"][:4] = 0  # one prompt of the two is dead, and one rollout of the other
    batch["advantages"][6] = 0
    batch["advantages"][[4, 5, 7]] = torch.tensor([2.0, -1.0, -1.0])
    trainer.current_gradient_accumulation_steps = 1
    return batch


def gradient(trainer, batch):
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, dict(batch))
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in trainer.model.parameters()])


def passed(completions, **_):
    return [float(i % 2) for i in range(len(completions))]
