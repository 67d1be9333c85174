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
def _one_thread(one_thread):
    """In every test of this package."""
