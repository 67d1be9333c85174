"""The prompt level inside TRL: a sampler that skips prompts before anything is generated, and replenishes the batch.

TRL's batch has a fixed number of prompts, so prompts are drawn in blocks (`dppo.prompts.pull_block`): the shortest
stretch of the epoch's order that leaves exactly that many after removing floor(r_q·n_low) of its low prompts. How long
it is depends on earlier steps only, so the estimate is unbiased for the mean over the stretch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from dppo.draws import MaskGenerator, combine, occurrences
from dppo.keys import hash_and_check, text_of
from dppo.prompts import PromptBlock, PromptHistory, pull_block
from icml26_shared.errors import require

require("trl", "dppo[trl]")
from trl.trainer.utils import RepeatSampler  # noqa: E402 after the check that names the extra

COLUMN = "_dppo"  # of a row: the `Draw` it came with


@dataclass(frozen=True)
class Draw:
    """How a prompt came into the batch.

    Attributes:
        key: stable 64-bit id of the prompt.
        weight: 1/(1−P).
        low: whether it could have been skipped.
        pulled: prompts of its block, skipped ones included: what Z counts.
        low_tokens: expected completion tokens of the block's low prompts, kept or skipped, per generation: known
            before the draw, so that Z does not depend on it.
    """

    key: int
    weight: float = 1.0
    low: bool = False
    pulled: int = 0
    low_tokens: float = 0.0


class DrawnIndex(int):
    """An index of the data set that carries its Draw through the data loader."""

    draw: Draw

    def __new__(cls, index: int, draw: Draw) -> DrawnIndex:
        self = super().__new__(cls, index)
        self.draw = draw
        return self

    def __getnewargs__(self) -> tuple[int, Draw]:  # type: ignore[override]  # for loader workers
        return int(self), self.draw


class DrawnDataset(torch.utils.data.Dataset):
    """A data set whose rows carry the Draw of the index they were asked with."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: DrawnIndex) -> dict[str, Any]:
        return {**self.dataset[int(index)], COLUMN: index.draw}

    def __getitems__(self, indices: Sequence[DrawnIndex]) -> list[dict[str, Any]]:
        return [self[index] for index in indices]


def dataset_keys(texts: Sequence[Any]) -> np.ndarray:
    """Stable ids of all prompts of a data set; different texts get different ids even if their hashes collide."""
    taken: dict[int, int] = {}
    keys = np.empty(len(texts), dtype=np.int64)
    for row, prompt in enumerate(texts):
        key, check = hash_and_check(text_of(prompt))
        while taken.setdefault(key, check) != check:
            key += 1
        keys[row] = key
    return keys


class PruningSampler(RepeatSampler):
    """TRL's RepeatSampler over blocks of prompts that survive the prompt level.

    With rate 0 it yields what RepeatSampler yields. One iteration yields as many batches as RepeatSampler would, going
    on into the next pass over the data where pruning leaves fewer, unless `max_passes` ends it before.

    Args:
        data_source, mini_repeat_count, batch_size, repeat_count, shuffle, seed: as of RepeatSampler.
        keys: stable id of each prompt of the data set.
        history: what each prompt taught; updated by the trainer.
        rate: r_q at this moment (annealing), called once a block.
        max_passes: passes over the data after which it ends, or None.
        refresh: "epoch": who is low is decided at the start of each pass; "batch": for each block.
        default_length: expected completion tokens of a low prompt whose length was not recorded.
    """

    def __init__(
        self, data_source: Any, mini_repeat_count: int, batch_size: int, repeat_count: int, shuffle: bool, seed: int,
        *, keys: np.ndarray, history: PromptHistory, rate: Callable[[], float], max_passes: float | None = None,
        refresh: str = "epoch", default_length: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__(data_source, mini_repeat_count, batch_size, repeat_count, shuffle, seed)
        self.keys, self.history, self.rate = keys, history, rate
        self.max_passes, self.refresh, self.default_length = max_passes, refresh, default_length
        self.passes, self.offset = 0, 0
        self.record: list[list[tuple[int, Draw]]] = []
        self._low = np.zeros(0, dtype=bool)
        self._order: np.ndarray | None = None
        self._replay = False

    @property
    def blocks_per_iteration(self) -> int:
        return self.num_samples // self.batch_size

    def __len__(self) -> int:
        return self.blocks_per_iteration * self.batch_size * self.mini_repeat_count * self.repeat_count

    def __iter__(self) -> Iterator[int]:
        if not self._replay:
            self.record = []
        self._replay = False
        for number in range(self.blocks_per_iteration):
            if number == len(self.record):
                block = self._next_block()
                if block is None:
                    return
                self.record.append(block)
            for _ in range(self.repeat_count):
                for index, draw in self.record[number]:
                    for _ in range(self.mini_repeat_count):
                        yield DrawnIndex(index, draw)

    def _next_block(self) -> list[tuple[int, Draw]] | None:
        """The next block of this pass, or of the next one; the incomplete rest of a pass is dropped, as TRL does."""
        for _ in range(2):
            if self._order is None:
                if self.max_passes is not None and self.passes >= self.max_passes:
                    return None
                self._start_pass()
            block = self._block()
            if block is not None:
                return block
            self.passes, self.offset, self._order = self.passes + 1, 0, None
        raise ValueError(f"the data set has {self.num_samples} prompts, fewer than one batch of {self.batch_size}")

    def _start_pass(self) -> None:
        self._order = self._permutation(self.passes)
        self.history.start_epoch()
        self._low = self.history.low(self.keys)

    def _permutation(self, number: int) -> np.ndarray:
        """The order of a pass; the same as RepeatSampler's `number`-th, however often this object was made anew."""
        if not self.shuffle:
            return np.arange(self.num_samples)
        generator = torch.Generator()
        generator.manual_seed(self.seed or 0)
        for _ in range(number + 1):
            order = torch.randperm(self.num_samples, generator=generator)
        return order.numpy()

    def _block(self) -> list[tuple[int, Draw]] | None:
        assert self._order is not None
        if self.refresh == "batch":
            self._low = self.history.low(self.keys)
        keys = torch.from_numpy(self.keys[self._order])
        rate = self.rate()
        low = self._low[self._order] & (rate > 0)
        source = MaskGenerator(self.seed or 0, self.passes, "prompts")
        uniform = source.uniform(combine(keys, occurrences(keys))).numpy()
        block = pull_block(low, uniform, self.offset, self.batch_size, rate)
        if block is None:
            return None
        self.offset += block.pulled
        return self._drawn(block, low)

    def _drawn(self, block: PromptBlock, low: np.ndarray) -> list[tuple[int, Draw]]:
        assert self._order is not None
        lengths = self.history.lengths(self.keys[self._order[block.low]])
        tokens = float(np.where(np.isnan(lengths), self.default_length, lengths).sum())
        return [
            (
                int(self._order[place]),
                Draw(int(self.keys[self._order[place]]), float(weight), bool(low[place]), block.pulled, tokens),
            )
            for place, weight in zip(block.kept, block.weight, strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to yield the same prompts with the same weights."""
        return {
            "passes": self.passes,
            "offset": self.offset,
            "in_pass": self._order is not None,
            "low": self._low.copy(),
            "record": [[[index, asdict(draw)] for index, draw in block] for block in self.record],
        }

    def load_state_dict(self, state: dict[str, Any], *, replay: bool) -> None:
        """Args: replay: whether the next iteration is the interrupted one, from its start (the loader skips what is
        done)."""
        self.passes, self.offset = state["passes"], state["offset"]
        self._low = np.asarray(state["low"], dtype=bool)
        if len(self._low) not in (0, self.num_samples):
            warnings.warn(
                f"the saved sampler is of a data set of {len(self._low)} prompts, this one has {self.num_samples}; "
                "prompt pruning starts afresh",
                UserWarning,
                stacklevel=2,
            )
            self.passes, self.offset, self._order, self.record, self._replay = 0, 0, None, [], False
            return
        self._order = self._permutation(self.passes) if state["in_pass"] else None
        self.record = [[(index, Draw(**draw)) for index, draw in block] for block in state["record"]]
        self._replay = replay
