"""Which rollout belongs to which prompt: equal consecutive groups, or group ids in any order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

GroupIds = Tensor | np.ndarray | Sequence[object]


@dataclass(frozen=True)
class Groups:
    """Groups of B rows: ``given`` (count,) int64 is the rows of each. Where they lie, one of

    ``width``: consecutive groups of this size; ``index`` (B,) int64: the group of each row, 0..count-1.
    """

    given: Tensor
    width: int | None = None
    index: Tensor | None = None

    @property
    def count(self) -> int:
        return self.given.numel()

    def sum(self, values: Tensor) -> Tensor:
        """Sum of ``values`` (B,) within each group, (count,) in the dtype of ``values``."""
        if self.index is None:
            return values.view(self.count, -1).sum(1) if self.count else values.new_zeros(0)
        return torch.zeros(self.count, dtype=values.dtype, device=values.device).index_add_(0, self.index, values)

    def spread(self, per_group: Tensor) -> Tensor:
        """The value of each row's group: (count,) to (B,)."""
        if self.index is None:
            return per_group.unsqueeze(1).expand(self.count, self.width or 0).reshape(-1)
        return per_group[self.index]


def make_groups(rows: int, device: torch.device, group_size: int | None, group_ids: GroupIds | None) -> Groups:
    """Build the groups of ``rows`` rollouts from exactly one of ``group_size`` and ``group_ids``.

    Raises:
        ValueError: both or neither given, a size that does not divide the rows, ids of the wrong length, a NaN id.
        TypeError: ids that are neither integers, strings nor other hashable values.
    """
    if (group_size is None) == (group_ids is None):
        given = "both" if group_size is not None else "neither"
        raise ValueError(f"give exactly one of group_size and group_ids, got {given}")
    if group_size is not None:
        return _consecutive(rows, device, group_size)
    assert group_ids is not None  # narrowed above, for the type checker
    index, count = _index_of(group_ids, rows, device)
    given_rows = torch.bincount(index, minlength=count)
    if bool((given_rows == 0).any()):  # gaps between integer ids
        kept = given_rows > 0
        index = (torch.cumsum(kept, 0) - 1)[index]
        given_rows = given_rows[kept]
    return Groups(given_rows, index=index)


def _consecutive(rows: int, device: torch.device, size: int) -> Groups:
    if isinstance(size, bool) or not isinstance(size, (int, np.integer)):
        raise TypeError(f"group_size = {size!r}: a whole number is needed")
    if size < 1:
        raise ValueError(f"group_size = {size}: a group has at least one rollout")
    if rows % size:
        raise ValueError(
            f"group_size = {size} does not divide the {rows} rewards: complete the last group, or pass group_ids for "
            "groups of unequal size"
        )
    count = rows // size
    return Groups(torch.full((count,), int(size), device=device, dtype=torch.int64), width=int(size))


def _index_of(ids: GroupIds, rows: int, device: torch.device) -> tuple[Tensor, int]:
    if isinstance(ids, Tensor):
        if ids.device != device:
            raise ValueError(f"group_ids are on {ids.device} and rewards on {device}: move them to one device")
        return _index_of_integers(_flat(ids, rows))
    if isinstance(ids, np.ndarray) and ids.dtype.kind in "iu" and ids.ndim == 1:
        return _index_of_integers(_flat(torch.from_numpy(ids.astype(np.int64)), rows).to(device))
    items = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
    if len(items) != rows or (isinstance(ids, np.ndarray) and ids.ndim != 1):
        raise ValueError(f"group_ids must be one id per reward: got {len(items)} for {rows} rewards")
    if any(item != item for item in items):
        raise ValueError("group_ids hold a NaN, which equals no group: name every rollout's prompt")
    try:
        number = {item: i for i, item in enumerate(dict.fromkeys(items))}
    except TypeError as error:
        raise TypeError(f"group_ids must be integers, strings or other hashable values ({error})") from None
    index = np.fromiter(map(number.__getitem__, items), dtype=np.int64, count=rows)
    return torch.from_numpy(index).to(device), len(number)


def _flat(ids: Tensor, rows: int) -> Tensor:
    if ids.shape != (rows,):
        raise ValueError(f"group_ids must be one id per reward: got shape {tuple(ids.shape)} for {rows} rewards")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"group_ids have dtype {ids.dtype}: integers are needed (or a list of strings)")
    return ids.long()


def _index_of_integers(ids: Tensor) -> tuple[Tensor, int]:
    if ids.numel() == 0:
        return ids, 0
    low, high = (int(v) for v in torch.aminmax(ids))
    # Ids in a narrow range need no sort: the range itself numbers the groups, and gaps are closed by the caller.
    if high - low < 4 * ids.numel():
        return ids - low, high - low + 1
    _, index = torch.unique(ids, return_inverse=True)
    return index, int(index.max()) + 1
