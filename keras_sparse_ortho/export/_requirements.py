"""Which optional packages an export needs, and what to install where they are missing."""

import importlib.util
import sys
from importlib import metadata

_NEEDED = ("tensorflow", "ai_edge_litert")
_REPORTED = ("keras", "tensorflow", "ai-edge-litert")


def require_litert() -> None:
    """Raise if TensorFlow or ai-edge-litert is missing, without importing either.

    Raises:
        ImportError: naming the extra to install.
    """
    for name in _NEEDED:
        if not _is_installed(name):
            raise ImportError(
                "`export_litert` converts with TensorFlow and runs the file with ai-edge-litert. "
                'Install both with: pip install "keras-sparse-ortho[litert]". '
                f"Received: no module named '{name}'",
                name=name,
            )


def require_interpreter() -> None:
    """Raise if ai-edge-litert is missing: opening a file needs no TensorFlow.

    Raises:
        ImportError: naming the package to install.
    """
    if not _is_installed("ai_edge_litert"):
        raise ImportError(
            "`load_litert` runs the file with ai-edge-litert. Install it with: pip install "
            "ai-edge-litert. Received: no module named 'ai_edge_litert'",
            name="ai_edge_litert",
        )


def versions() -> dict[str, str]:
    """The versions of the packages that made and ran the file."""
    found = {}
    for name in _REPORTED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # e.g. tensorflow-cpu, a build of another name
            found[name] = "unknown"
    return found


def _is_installed(name: str) -> bool:
    if name in sys.modules:
        return sys.modules[name] is not None  # None is how Python marks a blocked import
    return importlib.util.find_spec(name) is not None
