# SPDX-License-Identifier: Apache-2.0
"""Every thread that touches a GPU transfer runs in the CUDA context of the memory it touches.

Importing the package activates it: one import finder is installed, which patches a host (NIXL, …) when the
program imports it. Nothing else is loaded before that; the names below resolve on first use.

PYTEST_DONT_REWRITE: we have a pytest plugin, and the start-up file imports us before pytest could rewrite our asserts;
it would warn of that in every run.
"""

import sys

from ctxfix import _startup

TYPE_CHECKING = False  # `typing` is not loaded at interpreter start; type checkers know the bare name
if TYPE_CHECKING:
    from ctxfix._status import status
    from ctxfix.activation import (
        activate,
        deactivate,
        patch_host,
        patch_nixl,
        patch_ray,
        patch_sglang,
        patch_vllm,
        unpatch_host,
        unpatch_nixl,
        unpatch_ray,
        unpatch_sglang,
        unpatch_vllm,
    )
    from ctxfix.affinity import bound
    from ctxfix.counters import snapshot as stats
    from ctxfix.errors import CtxfixError, DriverError, PatchError, UnknownOwnerError
    from ctxfix.native.agents import native_threads

__version__ = "0.1.0"

__all__ = [
    "CtxfixError",
    "DriverError",
    "PatchError",
    "UnknownOwnerError",
    "activate",
    "bound",
    "deactivate",
    "native_threads",
    "patch_host",
    "patch_nixl",
    "patch_sglang",
    "patch_ray",
    "patch_vllm",
    "stats",
    "status",
    "unpatch_host",
    "unpatch_nixl",
    "unpatch_sglang",
    "unpatch_ray",
    "unpatch_vllm",
]

_HOMES = {
    "CtxfixError": ("ctxfix.errors", "CtxfixError"),
    "DriverError": ("ctxfix.errors", "DriverError"),
    "PatchError": ("ctxfix.errors", "PatchError"),
    "UnknownOwnerError": ("ctxfix.errors", "UnknownOwnerError"),
    "activate": ("ctxfix.activation", "activate"),
    "bound": ("ctxfix.affinity", "bound"),
    "deactivate": ("ctxfix.activation", "deactivate"),
    "native_threads": ("ctxfix.native.agents", "native_threads"),
    "patch_host": ("ctxfix.activation", "patch_host"),
    "patch_nixl": ("ctxfix.activation", "patch_nixl"),
    "patch_sglang": ("ctxfix.activation", "patch_sglang"),
    "patch_ray": ("ctxfix.activation", "patch_ray"),
    "patch_vllm": ("ctxfix.activation", "patch_vllm"),
    "stats": ("ctxfix.counters", "snapshot"),
    "status": ("ctxfix._status", "status"),
    "unpatch_host": ("ctxfix.activation", "unpatch_host"),
    "unpatch_nixl": ("ctxfix.activation", "unpatch_nixl"),
    "unpatch_sglang": ("ctxfix.activation", "unpatch_sglang"),
    "unpatch_ray": ("ctxfix.activation", "unpatch_ray"),
    "unpatch_vllm": ("ctxfix.activation", "unpatch_vllm"),
}


def __getattr__(name: str) -> object:
    """Load a public name from its module, once."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ctxfix' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    try:
        value = getattr(__import__(module, fromlist=(attribute,)), attribute)
    except ImportError as error:
        # Whoever goes through all names (inspect, completion) expects this error and no other.
        raise AttributeError(f"ctxfix.{name} cannot be loaded in {sys.executable}: {error}") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted({*globals(), *_HOMES})


_startup.install()
