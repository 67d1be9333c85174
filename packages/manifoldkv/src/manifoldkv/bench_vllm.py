"""One row of the bench inside an environment with vLLM: ``python -m manifoldkv.bench_vllm [PAIRS]``."""

from __future__ import annotations

import json
import sys

from icml26_shared import models
from icml26_shared.bench import Comparison, Measured
from manifoldkv.integrations.vllm.throughput import measure


def main(pairs: str = "3") -> None:
    """Print throughput with the plug-in against without it as one line of JSON."""
    found = measure(str(models.path("smollm2")), pairs=int(pairs), progress=lambda text: print(text, file=sys.stderr))
    times = Comparison(tuple(run.seconds for run in found.on), tuple(run.seconds for run in found.off))
    extra = {
        "lowest ratio": min(times.ratios),
        "peak blocks / bound": max(run.peak_blocks / run.bound for run in found.on),
        "peak blocks": max(run.peak_blocks for run in found.on),
        "preemptions, plug-in on": max(run.preemptions for run in found.on),
        "preemptions, plug-in off": min(run.preemptions for run in found.off),
    }
    print(json.dumps(Measured(times, extra=extra).to_json()))


if __name__ == "__main__":
    main(*sys.argv[1:])
