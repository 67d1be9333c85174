"""The base rate of each group, as the scheduler alone gives it, beside the rate that is written into the group.

Many schedulers compute the next rate from the one they find in ``group["lr"]``. So before a scheduler steps, the base
rates are put back; afterwards the product ``ratio * base`` is written. ``initial_lr`` and ``base_lrs`` are never
touched. A rate that somebody else wrote in between is taken as the new base rate.
"""

from __future__ import annotations

import copy
import functools
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

Group = dict[str, Any]
_before: weakref.WeakKeyDictionary[Any, weakref.WeakMethod[Callable[[], None]]] = weakref.WeakKeyDictionary()


def read_value(group: Group, key: str) -> float:
    """A number of a group; capturable optimisers keep it in a tensor."""
    return float(group[key])


def write_value(group: Group, key: str, value: float) -> None:
    """Set it, in place where it is a tensor."""
    if isinstance(group[key], torch.Tensor):
        group[key].fill_(value)
    else:
        group[key] = value


def unwrapped(optimizer: Any) -> Any:
    """The torch optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


class BaseValue:
    """One number of one group (``lr``, ``weight_decay``), scaled by a ratio.

    Attributes:
        base: the value without the ratio.
    """

    def __init__(self, group: Group, key: str) -> None:
        self.key = key
        self.base = read_value(group, key)
        self._written: float | None = None

    def observe(self, group: Group) -> float:
        """Take over what somebody else wrote; returns the base value."""
        present = read_value(group, self.key)
        if present != self._written:
            self.base, self._written = present, None
        return self.base

    def restore(self, group: Group) -> None:
        """Put the base value back."""
        if self._written is not None:
            write_value(group, self.key, self.observe(group))
        self._written = None

    def write(self, group: Group, factor: float) -> None:
        """Write ``factor * base``."""
        write_value(group, self.key, self.base * factor)
        self._written = read_value(group, self.key)  # a float32 tensor rounds

    def load(self, group: Group, base: float, factor: float) -> None:
        """Take a base value from a saved state and write the product."""
        self.base = base
        self.write(group, factor)


def call_before_step(scheduler: Any, restore: Callable[[], None]) -> None:
    """Have `restore`, a method, called whenever the scheduler is about to step, as long as its object lives.

    The instance gets a subclass of its class; its attributes, and so its ``state_dict``, stay as they are. Copies and
    pickles are of the original class.
    """
    cls: Any = type(scheduler)
    if getattr(cls, "_llr_base", None) is None:
        scheduler.__class__ = _stepping(cls)
    _before[scheduler] = weakref.WeakMethod(restore)


@functools.cache
def _stepping(cls: type) -> type:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        restore = _before[self]() if self in _before else None
        if restore is not None:
            restore()
        return cls.step(self, *args, **kwargs)  # type: ignore[attr-defined]

    def reduce(self: Any, protocol: Any) -> Any:
        return _rebuild, (cls,), self.__dict__

    functools.update_wrapper(step, cls.step)  # type: ignore[attr-defined]
    return type(
        cls.__name__, (cls,), {"step": step, "__reduce_ex__": reduce, "__module__": cls.__module__, "_llr_base": cls}
    )


def _rebuild(cls: Any) -> Any:
    return cls.__new__(cls)


def preview(optimizer: Optimizer, schedulers: Sequence[Any], steps: int) -> list[float]:
    """Rate of each group after `steps` more steps of the schedulers; theirs and the optimiser's state stay as they are.

    The groups must hold the base rates. `ReduceLROnPlateau` cannot be foreseen and is taken as constant.
    """
    stub = object.__new__(type(optimizer))  # groups without parameters, nothing else
    stub.defaults = optimizer.defaults
    stub.param_groups = [
        {key: copy.deepcopy(value) if key != "params" else [] for key, value in group.items()}
        for group in optimizer.param_groups
    ]
    foreseen = [s for s in schedulers if not isinstance(s, ReduceLROnPlateau)]
    owners = [optimizer, *(getattr(scheduler, "optimizer", optimizer) for scheduler in foreseen)]
    copies = copy.deepcopy(foreseen, {id(owner): stub for owner in owners})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the stub never steps, which schedulers remark on
        for _ in range(steps):
            for scheduler in copies:
                scheduler.step()
    return [read_value(group, "lr") for group in stub.param_groups]
