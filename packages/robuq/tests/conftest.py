"""Shared by the tests of robuq: run-time shape checks, hypothesis settings, threads."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

# Shape annotations of these modules are checked at run time. Kernels are left out: Triton and numba read their source.
_CHECKED = ("gaussian", "hadamard", "ternary", "quantizer", "lowrank", "linear", "packed", "attention")
install_import_hook([f"robuq.{name}" for name in _CHECKED], "beartype.beartype")

settings.register_profile("house", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")


@pytest.fixture(autouse=True)
def _one_thread():
    """Same arithmetic on every machine, and no fight over cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def unchecked():
    """Without the checks of annotations: what a user sees who passes something wrong."""
    from jaxtyping import config

    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)
