"""Engines, their inner life, and the torch reference they are compared with."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the scheduler lives here, so tests can look into it

TOSS = 1e-5
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@dataclass
class Trace:
    """What an engine did, step by step.

    Attributes:
        free: free blocks after each step.
        chunks: per request, ``(computed tokens before, tokens scheduled)`` of each of its steps.
        outputs: per request, the ids it generated (one list per sample).
    """

    free: list[int] = field(default_factory=list)
    chunks: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    outputs: dict[str, list[list[int]]] = field(default_factory=dict)
    texts: dict[str, list[str]] = field(default_factory=dict)


class Engine:
    """A vLLM engine in this process, stepped by hand."""

    def __init__(self, model: str, *, plugin: dict[str, Any] | None = None, **settings: Any) -> None:
        from vllm import LLM

        _leave_the_imports_out_of_collections()
        extra = {} if plugin is None else {"additional_config": {"manifoldkv": plugin}}
        defaults = {
            "dtype": "float32",
            "enforce_eager": True,
            "seed": 0,
            "disable_log_stats": True,
            "kv_cache_memory_bytes": 256 << 20,
            "block_size": 32,
            "max_model_len": 1024,
        }
        self.llm = LLM(model, **{**defaults, **extra, **settings})
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self._count = 0

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def free_blocks(self) -> int:
        return self.pool.get_num_free_blocks()

    def submit(self, prompt: list[int] | str, **sampling: Any) -> str:
        """Add a request (greedy unless told otherwise) and return its id."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        name = f"r{self._count}"
        self._count += 1
        given = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        self.engine.add_request(
            name, given, SamplingParams(**{**GREEDY, "output_kind": RequestOutputKind.FINAL_ONLY, **sampling})
        )
        return name

    def run(self, *, aborts: dict[int, list[str]] | None = None, limit: int = 5000) -> Trace:
        """Step until nothing is left; ``aborts`` maps a step to the requests aborted before it."""
        trace = Trace()
        with self._recording(trace):
            for step in range(limit):
                if aborts and step in aborts:
                    self.engine.abort_request(aborts[step])
                if not self.engine.has_unfinished_requests():
                    break
                for output in self.engine.step():
                    if output.finished:
                        trace.outputs[output.request_id] = [list(sample.token_ids) for sample in output.outputs]
                        trace.texts[output.request_id] = [sample.text for sample in output.outputs]
                trace.free.append(self.free_blocks)
            else:
                raise AssertionError(f"not done after {limit} steps")
        return trace

    def generate(self, prompt: list[int] | str, **sampling: Any) -> list[int]:
        """Ids of one greedy request that has the engine to itself."""
        name = self.submit(prompt, **sampling)
        return self.run().outputs[name][0]

    @contextlib.contextmanager
    def _recording(self, trace: Trace) -> Iterator[None]:
        scheduler, original = self.scheduler, self.scheduler.schedule

        def schedule(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            for inner, new in output.num_scheduled_tokens.items():
                request = scheduler.requests[inner]
                steps = trace.chunks.setdefault(inner.rsplit("-", 1)[0], [])
                steps.append((request.num_computed_tokens - new, new))
            return output

        scheduler.schedule = schedule
        try:
            yield
        finally:
            scheduler.schedule = original

    def close(self) -> None:
        self.core.shutdown()
        self.llm = self.engine = self.core = self.scheduler = None  # type: ignore[assignment]
        clean_up()


def clean_up() -> None:
    """Let the next engine of this process start from nothing."""
    from vllm.distributed import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()
    gc.collect()
    gc.freeze()  # what is left was imported or cached by the engine, for good


@functools.cache
def _leave_the_imports_out_of_collections() -> None:
    """Freeze the million objects of vLLM's modules, and keep them so.

    Each engine collects garbage a dozen times from its start to its end, and vLLM melts its own frozen heap for that:
    walking the modules each time takes longer than everything else an engine does here.
    """
    from vllm.v1.engine import core
    from vllm.v1.worker import gpu_worker

    gc.collect()
    gc.freeze()
    for module in (core, gpu_worker):
        module.freeze_gc_heap = lambda: None  # would freeze the engine itself, which has to go at its end
    gc.unfreeze = lambda: None


@contextlib.contextmanager
def engine(model: str, **settings: Any) -> Iterator[Engine]:
    made = Engine(model, **settings)
    try:
        yield made
    finally:
        made.close()


class Reference:
    """The same schedule in plain torch on a transformers model, sharing no code with the plug-in but the plain numbers.

    ``margin`` is how near the last replay came to a coin toss: the smallest gap between the last score kept and the
    first one dropped, or between the two best logits, in units of their spread. Below :data:`TOSS`, rounding decides.

    The cache holds, per layer and head: sinks, kept tokens, the rest. Positions are logical, so the stored keys carry
    their rotation; attention is exact over what is stored.
    """

    def __init__(self, model: Any, *, sink: int, middle: int, recent: int, interval: int, metric: str) -> None:
        self.model, self.metric = model, metric
        self.sink, self.middle, self.recent, self.interval = sink, middle, recent, interval
        self.margin = float("inf")

    def events(self, computed: int) -> int:
        over = computed - self.sink - self.middle - self.recent
        return over // self.interval if over > 0 else 0

    @torch.inference_mode()
    def replay(self, prompt: list[int], chunks: list[tuple[int, int]]) -> list[int]:
        """Greedy ids after the steps ``chunks``; one at 0 again is a resumed request, which starts afresh."""
        from transformers import DynamicCache

        tokens, produced = list(prompt), len(prompt)
        cache: Any = None
        self.margin = float("inf")
        for computed, new in chunks:
            if computed == 0:
                cache = DynamicCache()
            ids = torch.tensor([tokens[computed : computed + new]])
            position = torch.arange(computed, computed + new)[None]
            logits = self.model(input_ids=ids, position_ids=position, past_key_values=cache, use_cache=True).logits
            self._evict(cache, self.events(computed), self.events(computed + new))
            if computed + new == len(tokens):
                self._note(logits[0, -1].double(), 1)
                tokens.append(int(logits[0, -1].argmax()))
        return tokens[produced:]

    def chunked(self, length: int, new_tokens: int, chunk: int | None = None) -> list[tuple[int, int]]:
        """Steps of a lone request: the prompt in chunks, then one token at a time."""
        chunk = chunk or length
        steps = [(start, min(chunk, length - start)) for start in range(0, length, chunk)]
        return steps + [(length + i, 1) for i in range(new_tokens - 1)]

    def generate(self, prompt: list[int], new_tokens: int, chunk: int | None = None) -> list[int]:
        return self.replay(prompt, self.chunked(len(prompt), new_tokens, chunk))

    def _evict(self, cache: Any, before: int, after: int) -> None:
        if after == before:
            return
        new = self.interval * (after - before)
        for layer in cache.layers:
            layer.keys, layer.values = self._kept(layer.keys, layer.values, self.sink, self.middle + new)

    def _kept(self, keys: torch.Tensor, values: torch.Tensor, start: int, count: int) -> tuple[torch.Tensor, ...]:
        region = keys[:, :, start : start + count]
        scores = self._scores(region)
        self._note(scores, self.middle)
        order = scores.argsort(dim=-1, descending=True, stable=True)[..., : self.middle].sort(-1).values
        done = []
        for tensor in (keys, values):
            index = order[..., None].expand(*order.shape, tensor.shape[-1])
            kept = tensor[:, :, start : start + count].gather(2, index)
            done.append(torch.cat([tensor[:, :, :start], kept, tensor[:, :, start + count :]], dim=2))
        return tuple(done)

    def _note(self, values: torch.Tensor, kept: int) -> None:
        ranked = values.sort(dim=-1, descending=True).values
        gap = (ranked[..., kept - 1] - ranked[..., kept]) / values.std(dim=-1)
        self.margin = min(self.margin, float(gap.min()))

    def _scores(self, keys: torch.Tensor) -> torch.Tensor:
        keys = keys.double()
        if self.metric == "l2":
            return (keys - keys.mean(2, keepdim=True)).norm(dim=-1)
        unit = keys / keys.norm(dim=-1, keepdim=True)
        if self.metric == "cosine":
            return -(unit * torch.nn.functional.normalize(unit.mean(2, keepdim=True), dim=-1)).sum(-1)
        if self.metric == "cosine_mean":
            return -(unit * torch.nn.functional.normalize(keys.mean(2, keepdim=True), dim=-1)).sum(-1)
        if self.metric == "knorm":
            return -keys.norm(dim=-1)
        norm, centre = keys.norm(dim=-1), keys.mean(2, keepdim=True)
        cosine = (unit * torch.nn.functional.normalize(centre, dim=-1)).sum(-1)
        mean = norm.mean(-1, keepdim=True)
        return (norm - mean) ** 2 + 2 * mean * centre.norm(dim=-1) * (1 - cosine)  # radius-calibrated
