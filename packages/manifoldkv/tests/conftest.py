"""Shared by the tests of manifoldkv: run-time shape checks, tiny models, hypothesis settings."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

# Every shape annotation of these modules is checked at run time, in all tests that import them after this line. Kernels are
# left out: Triton reads the source of its functions, which the hook would wrap. So is config: its own checks are the subject.
_CHECKED = ("geometry", "rope", "scoring", "selection", "windows", "integrations.transformers")
install_import_hook([f"manifoldkv.{name}" for name in _CHECKED], "beartype.beartype")

settings.register_profile("house", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")


@pytest.fixture(autouse=True)
def _two_threads():
    """Same arithmetic on every machine, and no fight over cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(min(before, 2))
    yield
    torch.set_num_threads(before)


@pytest.fixture
def unchecked():
    """Without the checks of shape annotations: what a user sees who passes something wrong."""
    from jaxtyping import config

    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)
