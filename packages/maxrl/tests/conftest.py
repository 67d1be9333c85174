"""The shapes and types in the signatures are checked while the tests run."""

from jaxtyping import install_import_hook

_CHECKED = ("enumeration", "off_policy")
install_import_hook([f"maxrl.{name}" for name in _CHECKED], "beartype.beartype")
