"""Entry point of ``vllm.general_plugins``: vLLM calls :func:`register` in each of its processes, possibly repeatedly.

Importing this module imports neither torch nor vLLM.
"""

from __future__ import annotations

import logging
from typing import Any

from manifoldkv.integrations.vllm import config

logger = logging.getLogger("vllm.manifoldkv")

BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")
_stock_paths: dict[str, str] = {}


def register() -> None:
    """Put the evicting backends over the stock ones; with ``MANIFOLDKV_BUDGET=0`` do nothing at all.

    Without a budget in the environment the backends are registered by name only, because the settings may still come
    with ``additional_config``, and behave as the stock ones if they don't.

    Raises:
        ValueError: a MANIFOLDKV_ variable has a value that isn't allowed. Other errors are logged, no more.
    """
    settings = config.resolve()
    if config.from_environment().get("budget") == 0:
        return
    try:
        _override()
        if settings.enabled:
            from manifoldkv.integrations.vllm import backend  # noqa: F401 - an import that fails shall fail here
    except Exception:  # a plug-in's own failure never takes the server down
        logger.exception("manifoldkv: the plug-in can't be loaded; vLLM goes on without it")
        _restore()


def _override() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name in BACKENDS:
        member = getattr(AttentionBackendEnum, name, None)
        if member is None or member.get_path().startswith(__name__):
            continue
        _stock_paths[name] = member.get_path()  # another plug-in's, where it came first
        register_backend(member, f"{__name__}.{name}")


def _restore() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name, path in _stock_paths.items():
        register_backend(AttentionBackendEnum[name], path)
    _stock_paths.clear()


def __getattr__(name: str) -> Any:
    """The evicting backend of that name, made when vLLM first asks for it; the stock one should that fail."""
    if name not in _stock_paths:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from manifoldkv.integrations.vllm.backend import evicting_backend

        return evicting_backend(_stock_paths[name])
    except Exception:  # as above
        logger.exception("manifoldkv: the plug-in can't be loaded; vLLM goes on without it")
        from vllm.utils.import_utils import resolve_obj_by_qualname

        return resolve_obj_by_qualname(_stock_paths[name])
