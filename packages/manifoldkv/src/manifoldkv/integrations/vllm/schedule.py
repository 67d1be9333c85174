"""When a request loses tokens, and which ones: pure arithmetic on its token count.

The scheduler process frees blocks and the worker process compacts the cache without a word between them. That is safe
only because both derive the same answer from the one number they share: how many tokens of the request are computed.
This module is that answer; it imports nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Which tokens of a request are stored, as a function of its number of computed tokens ``c``.

    A request's tokens are, in logical order: ``sink`` first ones, a ``middle`` region that holds the kept tokens, a gap
    whose blocks are given back, and the rest, which is never less than ``recent`` once there is a gap:

        events(c) = max(0, floor((c - (sink + middle + recent)) / interval))
        gap(c)    = tokens [sink + middle, sink + middle + interval * events(c))

    Each event scores the middle region together with the next ``interval`` tokens and keeps ``middle`` of them a head.

    Attributes:
        sink, middle, recent, interval: numbers of tokens, multiples of ``block``.
        block: tokens per block for which they were rounded.
    """

    sink: int
    middle: int
    recent: int
    interval: int
    block: int

    @classmethod
    def rounded(cls, *, sink: int, budget: int, recent: int, interval: int, block: int) -> Schedule:
        """Round sinks, budget and recent tokens up to whole blocks.

        Raises:
            ValueError: ``interval`` isn't a multiple of ``block``, so that an event would free a part of a block.
        """
        if interval % block:
            raise ValueError(
                f"the eviction interval of {interval} tokens is not a multiple of the block size of {block} tokens; "
                f"set MANIFOLDKV_INTERVAL to {-(-interval // block) * block}, or a block size that divides {interval}"
            )
        sink, middle, recent = (-(-tokens // block) * block for tokens in (sink, budget, recent))
        return cls(sink=sink, middle=middle, recent=recent, interval=interval, block=block)

    @property
    def gap_start(self) -> int:
        """First token of every gap."""
        return self.sink + self.middle

    def events(self, computed: int) -> int:
        """Evictions done once ``computed`` tokens are computed."""
        return max(0, (computed - self.gap_start - self.recent) // self.interval)

    def gap_tokens(self, computed: int) -> int:
        """Tokens in the gap."""
        return self.interval * self.events(computed)

    def gap(self, computed: int) -> tuple[int, int]:
        """Gap as tokens ``[first, last)``; empty where both are equal."""
        return self.gap_start, self.gap_start + self.gap_tokens(computed)

    def gap_blocks(self, computed: int, block: int) -> tuple[int, int]:
        """Whole blocks of ``block`` tokens inside the gap, ``[first, last)``.

        With blocks larger than those the schedule was rounded for, a block that reaches beyond the gap isn't in it.
        """
        start, stop = self.gap(computed)
        first = -(-start // block)
        return first, max(first, stop // block)

    def stored(self, computed: int) -> int:
        """Tokens stored per head after ``computed`` tokens: at most ``sink + middle + recent + interval - 1``,
        or ``computed`` where that is less."""
        return computed - self.gap_tokens(computed)

    def peak_tokens(self, in_flight: int) -> int:
        """Upper bound of the tokens a request needs room for while a step of ``in_flight`` tokens is running."""
        return self.sink + self.middle + self.recent + self.interval + in_flight
