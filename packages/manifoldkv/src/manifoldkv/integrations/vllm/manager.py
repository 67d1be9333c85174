"""The scheduler's side: blocks of the gap go back to the pool while the request runs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from manifoldkv.integrations.vllm import metrics

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from manifoldkv.integrations.vllm.spec import ManifoldKVSpec

logger = logging.getLogger("vllm.manifoldkv")


class ManifoldKVManager(FullAttentionManager):
    """Full attention with a gap: logical addressing stays, the gap's blocks become the null block.

    Blocks are freed on the count of tokens whose steps were already processed, so the step that compacted them is over,
    and any later step (in flight or not) derives a gap that contains this one and reads none of them.
    """

    supports_fine_grained_hash_lookup = False

    def __init__(self, kv_cache_spec: ManifoldKVSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.schedule = kv_cache_spec.schedule
        # Lets prompts in that are longer than the whole pool: they never hold more blocks than this.
        self.max_admission_blocks_per_request = kv_cache_spec.admission_blocks(kv_cache_spec.max_in_flight_tokens)
        self._usage: dict[str, metrics.RequestUsage] = {}
        self._steps_alone = kv_cache_spec.max_in_flight_steps == 1
        self._due: dict[str, int] = {}  # requests whose last step evicted, and their tokens after it

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free the gap of ``processed_computed_tokens``."""
        del num_prompt_tokens
        self._free_gap(request_id, processed_computed_tokens)

    def new_step_starts(self) -> None:
        """Free the gaps of the step before, of all its requests, ahead of any allocation.

        Otherwise a request that comes early in the order finds the pool full and has the last one preempted, the very
        one that is about to give back most of its prompt. Only where a step is processed before the next is scheduled.
        """
        super().new_step_starts()
        for request_id, computed in self._due.items():
            self._free_gap(request_id, computed)
        self._due.clear()

    def _free_gap(self, request_id: str, computed: int) -> None:
        """An error frees nothing, which costs memory and no correctness."""
        try:
            first, last = self.schedule.gap_blocks(computed, self.block_size)
            before = self.block_pool.get_num_free_blocks()
            self._remove_blocks_in_range(request_id, first, last)
            freed = self.block_pool.get_num_free_blocks() - before
        except Exception:  # noqa: BLE001 - whatever it is, the server goes on without this piece of memory
            metrics.log_once(logger, "freeing blocks failed; requests keep their blocks until they finish")
            return
        if freed:
            self._usage.setdefault(request_id, metrics.RequestUsage()).freed += freed

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        new = super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)
        usage = self._usage.setdefault(request_id, metrics.RequestUsage())
        usage.peak = max(usage.peak, len(self.req_to_blocks[request_id]) - usage.freed)
        usage.tokens = max(usage.tokens, num_tokens)
        if self._steps_alone:
            first, last = self.schedule.gap_blocks(num_tokens, self.block_size)
            if last - first > usage.freed:
                self._due[request_id] = num_tokens
        return new

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """A request ends, is aborted or is preempted: report it and forget it (a resumed one starts from nothing)."""
        usage = self._usage.pop(request_id, None)
        self._due.pop(request_id, None)
        if usage is not None and usage.freed:
            logger.info(
                "manifoldkv: request %s gave up %d of %d tokens: %d blocks freed while it ran, %d blocks at its peak",
                request_id,
                usage.freed * self.block_size,
                usage.tokens,
                usage.freed,
                usage.peak,
            )
        metrics.scheduler.add(usage)
        return super().pop_blocks_for_free(request_id)

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int] = (),
    ) -> None:
        """Do nothing: a compacted block doesn't hold the tokens its hash would promise, so none is ever shared."""

    @classmethod
    def find_longest_cache_hit(
        cls, block_hashes: Any, max_length: int, kv_cache_group_ids: list[int], *args: Any, **kwargs: Any
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """No hit, in this group and so in any hybrid model that has it."""
        return tuple([] for _ in kv_cache_group_ids), 0
