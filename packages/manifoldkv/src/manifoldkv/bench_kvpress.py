"""One row of the bench inside an environment where kvpress works: ``python -m manifoldkv.bench_kvpress METRIC PRESS``.

Both presses hook the same random Llama (8 layers, 8 key-value heads of 128) on the same prompt, in turns.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from icml26_shared.bench import Measured, compare


def main(metric: str, press: str, tokens: str = "2048", pairs: str = "10") -> None:
    """Print the measurement as one line of JSON."""
    import kvpress
    import torch
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    from manifoldkv.integrations.kvpress import ManifoldKVPress

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=1000,
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 1000, (1, int(tokens)))

    def prefill(own: Any) -> None:
        with torch.inference_mode(), own(model):
            model(ids, past_key_values=DynamicCache(), logits_to_keep=1)

    ours = ManifoldKVPress(0.5, metric=metric)
    theirs = getattr(kvpress, press)(0.5)
    times = compare(lambda: prefill(ours), lambda: prefill(theirs), pairs=int(pairs), warmup=2)
    print(json.dumps(Measured(times).to_json()))


if __name__ == "__main__":
    main(*sys.argv[1:])
