# SPDX-License-Identifier: Apache-2.0
"""What is on, off or pending in this process, and why.

Loads no host, no CUDA and nothing of a host's: versions come from the metadata of installed distributions.
"""

import importlib.machinery
import importlib.metadata
import importlib.util
import os
import platform
import site
import sys
import sysconfig
from dataclasses import asdict
from importlib import import_module
from typing import Any

from ctxfix import _startup

START_FILES = ("ctxfix-init.pth", "ctxfix-init.start")
PLUGIN_GROUP, PLUGIN = "sglang.srt.plugins", "ctxfix"  # SGLang's plugin group, and our name in it


def status() -> dict[str, Any]:
    """Tell what is on, off or pending in this process, and why, as plain data whose keys stay from release to release.

    Imports no host and no CUDA. Never raises for what is missing: it says so.

    Returns:
        ``version``, ``location``, ``python`` (``gil``: whether its lock is on now); ``active`` (bool) and ``reason``;
        ``start_files`` and ``started_by``;
        ``targets``: by module of a host its ``version``, ``state`` and ``reason``; ``sglang_plugin``, ``threads``,
        ``native``: state and reason of each; ``libraries``: versions; ``settings``, with ``problems``; ``counters`` as
        :func:`ctxfix.stats` gives them; ``failures``: the first of each place.
    """
    import ctxfix

    return {
        "version": ctxfix.__version__,
        "location": os.path.dirname(os.path.abspath(ctxfix.__file__)),
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": sys.executable,
            "free_threaded": bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
            "gil": getattr(sys, "_is_gil_enabled", lambda: True)(),
        },
        "active": _startup.installed(),
        "reason": _reason(),
        "start_files": _start_files(),
        "started_by": _startup.started_by,
        "targets": {name: _target(name) for name in list(_startup.TARGETS)},
        "sglang_plugin": _sglang_plugin(),
        "threads": _threads(),
        "native": _native(),
        "libraries": {name: version_of(name) for name in ("cuda-python", "cuda-bindings", "wrapt")},
        "settings": _settings(),
        "counters": _counters(),
        "failures": dict(_startup.failures),
    }


def _reason() -> str:
    """Say why ctxfix is on or off here."""
    off = _startup.off_reason()
    if off:
        return off
    if not _startup.installed():
        return "ctxfix.deactivate() was called, or sys.meta_path was emptied"
    return f"activated by: {_startup.started_by}"


def _start_files() -> list[dict[str, Any]]:
    """Find our start-up files. One in no site directory never runs: after ``pip install --target``, say."""
    directories = [os.path.realpath(entry) for entry in site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        directories.append(os.path.realpath(site.getusersitepackages()))
    places = dict.fromkeys([os.path.realpath(entry or os.curdir) for entry in sys.path] + directories)
    name = START_FILES[sys.version_info >= (3, 15)]
    found = []
    for place in places:
        path = os.path.join(place, name)
        if not os.path.isfile(path):
            continue
        if sys.flags.no_site:
            reason = "this interpreter runs with -S, which reads no start-up files"
        elif place not in directories:
            reason = "Python reads start-up files in site directories only; use `ctxfix run` or import ctxfix"
        else:
            reason = ""
        found.append({"path": path, "runs": not reason, "reason": reason})
    return found


def _target(name: str) -> dict[str, Any]:
    """State of one target: not installed, pending, imported (but not patched), patched or failed."""
    package = name.partition(".")[0]
    version = version_of(package.replace("_", "-"))
    outcome = _startup.outcomes.get(name, "")
    state, _, reason = outcome.partition(": ")
    if outcome:
        return {"version": version, "state": state, "reason": reason}
    if name in sys.modules:
        why = _startup.off_reason() or "imported before ctxfix, or unpatched; ctxfix.activate() patches it"
        return {"version": version, "state": "imported", "reason": why}
    folders = folders_of(package)
    if version is None and not folders:
        return {"version": None, "state": "not installed", "reason": ""}
    if folders and not has_module(folders, name):
        why = f"{package} {version or ''} has no module {name}; the hooks on other modules and on new threads serve it"
        return {"version": version, "state": "absent", "reason": why.replace("  ", " ")}
    if _startup.installed() and _startup.wanted(name):
        return {"version": version, "state": "pending", "reason": "patched when it is imported"}
    why = _startup.off_reason() or "unpatched, or ctxfix.deactivate() was called"
    return {"version": version, "state": "off", "reason": why}


def folders_of(package: str) -> list[str]:
    """Where the modules of a top-level package are. Imports nothing."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []
    return list(spec.submodule_search_locations or ()) if spec is not None else []


def has_module(folders: list[str], name: str) -> bool:
    """Whether the module ``name`` is in its package's ``folders``; to find its spec would import its parents."""
    path = os.path.join(*name.split(".")[1:])
    for folder in folders:
        stem = os.path.join(folder, path)
        if os.path.isfile(os.path.join(stem, "__init__.py")):
            return True
        if any(os.path.isfile(stem + suffix) for suffix in importlib.machinery.all_suffixes()):
            return True
    return False


def _sglang_plugin() -> dict[str, str]:
    """Whether SGLang itself loads ctxfix, through its plugin group."""
    version, folders = version_of("sglang"), folders_of("sglang")
    if not folders:
        return {"state": "not installed", "reason": ""}
    if not has_module(folders, PLUGIN_GROUP):
        return {"state": "off", "reason": f"SGLang {version} loads no plugins; the start-up file does not need it to"}
    try:
        points = importlib.metadata.entry_points(group=PLUGIN_GROUP)
    except Exception as error:  # those of any package
        return {"state": "unknown", "reason": f"entry points cannot be read: {type(error).__name__}: {error}"}
    if not any(point.name == PLUGIN for point in points):
        return {"state": "missing", "reason": f"no entry point {PLUGIN!r} in {PLUGIN_GROUP}: reinstall ctxfix"}
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    if allowed and PLUGIN not in [name.strip() for name in allowed.split(",")]:
        return {
            "state": "left out",
            "reason": f"SGLANG_PLUGINS={allowed} does not name {PLUGIN}, so SGLang does not load it. The start-up file "
            f"does; where that does not run, set SGLANG_PLUGINS={allowed.rstrip(', ')},{PLUGIN}",
        }
    return {"state": "on", "reason": f"SGLang {version} loads ctxfix in each of its processes"}


def version_of(distribution: str) -> str | None:
    """The version of an installed distribution, or None. Imports nothing of it, and never raises."""
    try:
        return importlib.metadata.version(distribution)
    except Exception:  # it is not installed, its metadata cannot be read, or no distribution has such a name
        return None


def _threads() -> dict[str, Any]:
    threads = sys.modules.get("ctxfix.threads")
    if threads is None:
        return {
            "installed": False,
            "reason": "installed when the first host is patched, or by ctxfix.activate()",
        }
    result: dict[str, Any] = threads.status()
    return result


def _native() -> dict[str, Any]:
    """State of the C extension, which is optional: ``available``, ``reason``, and what it says itself."""
    try:
        state: dict[str, Any] = import_module("ctxfix.native").status()
    except Exception as error:
        return {"available": False, "reason": f"not built ({type(error).__name__}: {error})"}
    if not state["available"]:
        state["reason"] = f"{state['reason']}: NIXL's own threads, so receivers, are not bound (ctxfix doctor)"
    return {"reason": "; ".join(state.get("problems", ())), **state}


def _settings() -> dict[str, Any]:
    try:
        settings: dict[str, Any] = asdict(import_module("ctxfix.settings").current())
    except Exception as error:
        return {"problems": [f"the settings cannot be read: {type(error).__name__}: {error}"]}
    settings["problems"] = list(settings["problems"])
    return settings


def _counters() -> dict[str, int]:
    counters = sys.modules.get("ctxfix.counters")
    return dict(counters.snapshot()) if counters is not None else {}
