# SPDX-License-Identifier: Apache-2.0
"""The import finder: what it patches, when, and that the host's import never suffers."""

from __future__ import annotations

import builtins
import copy
import importlib
import importlib.util
import logging
import signal
import subprocess
import sys
import threading
import types
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from environments import clean_environment

import ctxfix
from ctxfix import _startup, activation
from ctxfix.errors import DriverError, PatchError

pytestmark = pytest.mark.usefixtures("startup_state")

HOST = "fakehost.api"
Write = Callable[[str, str], Path]


class Patch:
    """Stands in for a module of ``ctxfix.patches``: counts and, on demand, fails."""

    def __init__(self) -> None:
        self.modules: list[types.ModuleType] = []
        self.error: BaseException | None = None
        self.wrapped_on_top = False

    def apply(self, module: types.ModuleType) -> None:
        self.modules.append(module)
        if self.error is not None:
            raise self.error
        module.patched = True

    def remove(self) -> None:
        if self.wrapped_on_top:
            raise PatchError("fakehost.api.Agent.post was wrapped after ctxfix")
        for module in self.modules:
            module.__dict__.pop("patched", None)
        self.modules.clear()


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> Patch:
    """A target and its patch, with ctxfix on."""
    for name in ("CTXFIX_DISABLE", "CTXFIX_STRICT", "CTXFIX_LOG"):
        monkeypatch.delenv(name, raising=False)
    patch = Patch()
    monkeypatch.setitem(sys.modules, "fakepatch", patch)
    # The hook of threads has its own tests; here its place is taken by something harmless.
    monkeypatch.setitem(sys.modules, "ctxfix.threads", types.SimpleNamespace(apply=lambda: True, remove=lambda: None))
    _startup.TARGETS.clear()
    _startup.TARGETS[HOST] = "fakepatch"
    _startup.uninstall()
    _startup.install()
    return patch


def test_target_is_patched_when_it_is_imported(patch: Patch, package: Write) -> None:
    package(HOST, "value = 1")
    module = importlib.import_module(HOST)
    assert patch.modules == [module] and module.patched and module.value == 1
    assert _startup.outcomes == {HOST: "patched"}


def test_original_loader_is_back_before_the_module_runs(patch: Patch, package: Write) -> None:
    package(HOST, "seen = type(__loader__).__name__, type(__spec__.loader).__name__")
    module = importlib.import_module(HOST)
    assert module.seen == ("SourceFileLoader", "SourceFileLoader")
    assert type(module.__loader__).__name__ == type(module.__spec__.loader).__name__ == "SourceFileLoader"


def test_other_modules_are_left_alone(patch: Patch, package: Write) -> None:
    package("fakehost.other", "")
    module = importlib.import_module("fakehost.other")
    assert patch.modules == [] and not hasattr(module, "patched")


def test_reload_patches_again(patch: Patch, package: Write) -> None:
    package(HOST, "")
    module = importlib.import_module(HOST)
    del module.patched
    assert importlib.reload(module) is module
    assert module.patched and patch.modules == [module, module]
    assert type(module.__spec__.loader).__name__ == "SourceFileLoader"


def test_target_in_a_zip_file(patch: Patch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "host.zip", "w") as archive:
        archive.writestr("fakehost/__init__.py", "")
        archive.writestr("fakehost/api.py", "")
    monkeypatch.syspath_prepend(str(tmp_path / "host.zip"))
    module = importlib.import_module(HOST)
    assert module.patched and type(module.__loader__).__name__ == "zipimporter"


def test_target_that_is_a_namespace_package(patch: Patch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fakehost" / "api").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert list(importlib.import_module(HOST).__path__) == [str(tmp_path / "fakehost" / "api")]
    assert _startup.failures == {}


def test_target_that_replaces_itself_in_sys_modules(patch: Patch, package: Write) -> None:
    package(HOST, "import sys, types; sys.modules[__name__] = types.ModuleType('fakehost.real')")
    module = importlib.import_module(HOST)
    assert module.__name__ == "fakehost.real" and module.patched


def test_spec_found_without_import_works_as_usual(patch: Patch, package: Write) -> None:
    path = package(HOST, "value = 1")
    importlib.import_module("fakehost")
    spec = importlib.util.find_spec(HOST)
    assert spec is not None and spec.origin == str(path)
    assert spec.loader.get_source(HOST) == "value = 1"  # type: ignore[union-attr]
    assert copy.copy(spec.loader).get_source(HOST) == "value = 1"  # type: ignore[union-attr]
    assert patch.modules == []
    lazy = importlib.util.LazyLoader(spec.loader)
    spec.loader = lazy
    module = importlib.util.module_from_spec(spec)
    sys.modules[HOST] = module
    lazy.exec_module(module)
    assert patch.modules == []
    assert module.value == 1 and patch.modules == [module]


def test_missing_target_is_missing(patch: Patch) -> None:
    with pytest.raises(ModuleNotFoundError, match="fakehost"):
        importlib.import_module(HOST)


def test_error_in_the_host_is_the_hosts(patch: Patch, package: Write) -> None:
    package(HOST, "raise KeyError('host')")
    with pytest.raises(KeyError, match="host"):
        importlib.import_module(HOST)
    assert HOST not in sys.modules and patch.modules == [] and _startup.failures == {}


def test_legacy_loader_without_exec_module(
    patch: Patch, package: Write, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Legacy:
        def find_spec(self, name: str, path: object = None, target: object = None) -> object:
            if name != HOST:
                return None
            spec = importlib.util.spec_from_loader(name, loader=None, origin="legacy")
            spec.loader = types.SimpleNamespace(load_module=None)
            return spec

    monkeypatch.setattr(sys, "meta_path", [sys.meta_path[0], Legacy(), *sys.meta_path[1:]])
    spec = importlib.util.find_spec(HOST) if package("fakehost.x", "") else None
    assert type(spec.loader) is types.SimpleNamespace
    assert "has no exec_module" in _startup.outcomes[HOST]


@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit(3), PatchError("no class Agent")])
def test_failing_patch_lets_the_import_succeed_and_warns_once(
    patch: Patch, package: Write, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    package(HOST, "value = 1")
    patch.error = error
    module = importlib.import_module(HOST)
    importlib.reload(module)
    assert module.value == 1
    (record,) = caplog.records
    assert record.name == "ctxfix" and record.levelno == logging.WARNING
    assert f"patching {HOST}: {type(error).__name__}: {error}" in record.getMessage()
    assert _startup.outcomes[HOST] == f"failed: {type(error).__name__}: {error}"
    patch.error = None
    importlib.reload(module)
    assert _startup.outcomes[HOST] == "patched" and _startup.failures == {}


def test_patch_module_that_cannot_be_imported(patch: Patch, package: Write) -> None:
    package(HOST, "value = 1")
    package("fakebroken", "import fake_dependency_that_is_missing")
    _startup.TARGETS[HOST] = "fakebroken"
    assert importlib.import_module(HOST).value == 1
    expected = f"No module named 'fake_dependency_that_is_missing'; install it for {sys.executable}"
    assert expected in _startup.outcomes[HOST]


def test_warning_that_cannot_be_logged_stays_ours(
    patch: Patch, package: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    package(HOST, "value = 1")
    patch.error = ValueError("broken")
    monkeypatch.setattr(logging.getLogger("ctxfix"), "warning", fail)
    assert importlib.import_module(HOST).value == 1
    assert "OSError while logging" in _startup.failures["logging"]


def test_error_without_a_printable_message(patch: Patch, package: Write) -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    package(HOST, "value = 1")
    patch.error = Unprintable()
    assert importlib.import_module(HOST).value == 1
    assert "cannot be printed" in _startup.outcomes[HOST]


def test_log_off_silences_the_warning(
    patch: Patch, package: Write, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CTXFIX_LOG", "off")
    package(HOST, "")
    patch.error = ValueError("broken")
    importlib.import_module(HOST)
    assert caplog.records == [] and HOST in _startup.outcomes


def test_keyboard_interrupt_is_the_users(patch: Patch, package: Write) -> None:
    package(HOST, "")
    patch.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        importlib.import_module(HOST)


def test_strict_mode_raises_a_typed_error(patch: Patch, package: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CTXFIX_STRICT", "1")
    package(HOST, "")
    patch.error = ValueError("broken")
    with pytest.raises(PatchError, match=r"patching fakehost\.api: ValueError: broken") as caught:
        importlib.import_module(HOST)
    assert caught.value.__cause__ is patch.error
    patch.error = DriverError("refused", 201)
    with pytest.raises(DriverError):
        importlib.import_module(HOST)


def test_eight_threads_import_at_once(patch: Patch, package: Write) -> None:
    package(HOST, "import time; time.sleep(0.2); value = 1")
    ready = threading.Barrier(8)
    seen = []

    def importer() -> None:
        ready.wait()
        seen.append(importlib.import_module(HOST).patched)

    threads = [threading.Thread(target=importer) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert seen == [True] * 8 and len(patch.modules) == 1


def test_target_imported_before_ctxfix_is_patched_at_once(patch: Patch, package: Write) -> None:
    _startup.uninstall()
    package(HOST, "")
    module = importlib.import_module(HOST)
    assert patch.modules == []
    _startup.install()
    _startup.install()
    assert patch.modules == [module]


def test_target_being_imported_by_another_thread_when_ctxfix_comes(patch: Patch, package: Write) -> None:
    _startup.uninstall()
    package(HOST, "import fakegate; fakegate.begun.set(); fakegate.go.wait(20); value = 1")
    gate = sys.modules["fakegate"] = types.ModuleType("fakegate")
    gate.begun, gate.go = threading.Event(), threading.Event()  # type: ignore[attr-defined]
    importer = threading.Thread(target=importlib.import_module, args=(HOST,))
    importer.start()
    assert gate.begun.wait(20)
    threading.Timer(0.2, gate.go.set).start()
    _startup.install()
    importer.join(20)
    assert patch.modules[0].value == 1, "patched before the module had run"


def test_target_that_imports_ctxfix_itself(patch: Patch, package: Write) -> None:
    _startup.uninstall()
    package(HOST, "from ctxfix import _startup; _startup.install()")
    importlib.import_module(HOST)
    assert patch.modules == [] and "half imported" in _startup.outcomes[HOST]
    assert _startup.patch_present(HOST) is None
    assert _startup.outcomes[HOST] == "patched"


def test_install_never_raises(patch: Patch, package: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> None:
        raise SystemExit(1)

    monkeypatch.setattr(_startup, "patch_present", fail)
    _startup.at_start()
    assert "SystemExit" in _startup.failures[f"patching {HOST}"]


def test_finder_behind_another_that_asks_the_rest(
    patch: Patch, package: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other:
        """A hook of another library: in front of us, and not guarded against being asked by us."""

        def find_spec(self, name: str, path: object = None, target: object = None) -> object:
            specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
            return next(filter(None, specs), None) if name == HOST else None

    package(HOST, "")
    monkeypatch.setattr(sys, "meta_path", [Other(), *sys.meta_path])
    importlib.import_module(HOST)
    assert len(patch.modules) == 1


def test_finder_that_keeps_its_specs(patch: Patch, package: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    package(HOST, "seen = type(__loader__).__name__")
    importlib.import_module("fakehost")
    spec = importlib.machinery.PathFinder.find_spec(HOST, sys.modules["fakehost"].__path__)
    keeper = types.SimpleNamespace(find_spec=lambda name, path, target=None: spec if name == HOST else None)
    monkeypatch.setattr(sys, "meta_path", [sys.meta_path[0], keeper, *sys.meta_path[1:]])
    importlib.util.find_spec(HOST)
    assert importlib.import_module(HOST).seen == "SourceFileLoader"
    assert len(patch.modules) == 1


@pytest.mark.parametrize("value", ["1", "true", "YES", "on", "maybe", "2"])
def test_off_switch(patch: Patch, package: Write, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CTXFIX_DISABLE", value)
    _startup.uninstall()
    _startup.install()
    assert not _startup.installed() and value in _startup.off_reason()
    assert not ctxfix.activate() and "off" in ctxfix.patch_nixl.__globals__["_patch"]("fakepatch")[HOST]
    assert ("neither 0 nor 1" in _startup.off_reason()) == (value in ("maybe", "2"))


@pytest.mark.parametrize("value", ["", "0", "False", "no", "OFF"])
def test_off_switch_that_says_on(patch: Patch, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CTXFIX_DISABLE", value)
    assert _startup.off_reason() == ""


def test_off_switch_set_by_the_program_itself(patch: Patch, package: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CTXFIX_DISABLE", "1")
    package(HOST, "")
    importlib.import_module(HOST)
    assert patch.modules == []


def test_patch_and_unpatch_one_host(patch: Patch, package: Write) -> None:
    from ctxfix import activation

    assert activation._patch("fakepatch") == {HOST: "pending"}
    package(HOST, "")
    module = importlib.import_module(HOST)
    assert activation._patch("fakepatch") == {HOST: "patched"} and len(patch.modules) == 1
    assert activation._unpatch("fakepatch") == {HOST: "not patched"}
    assert not hasattr(module, "patched")
    importlib.reload(module)
    _startup.install()
    assert not hasattr(module, "patched"), "patched again although the user took it off"
    assert activation._patch("fakepatch") == {HOST: "patched"} and module.patched
    activation._unpatch("fakepatch")
    assert ctxfix.activate() and module.patched, "activate() switches everything on"


def test_deactivate_undoes_and_activate_redoes(patch: Patch, package: Write) -> None:
    package(HOST, "")
    module = importlib.import_module(HOST)
    ctxfix.deactivate()
    ctxfix.deactivate()
    assert not hasattr(module, "patched") and not _startup.installed()
    assert ctxfix.activate() and module.patched and _startup.installed()


def test_activate_makes_the_hook_of_threads_live() -> None:
    code = """
import threading, sys, ctxfix
assert ctxfix.activate() and "ctxfix.affinity" in sys.modules and ctxfix.status()["threads"]["installed"]
ctxfix.deactivate()
assert not ctxfix.status()["threads"]["installed"] and not ctxfix.status()["active"]
"""
    environment = clean_environment(PYTHONPATH=str(Path(ctxfix.__file__).parent.parent))
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=environment)


def test_deactivate_tells_who_wrapped_on_top(patch: Patch, package: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    removed = []
    sys.modules["ctxfix.threads"].remove = lambda: removed.append(True)  # type: ignore[method-assign]
    package(HOST, "")
    importlib.import_module(HOST)
    patch.wrapped_on_top = True
    with pytest.raises(PatchError, match="Agent.post was wrapped after ctxfix"):
        ctxfix.deactivate()
    assert removed, "one patch that stays must not keep the others on"


@pytest.mark.parametrize("error", [SystemExit, TimeoutError, RuntimeError], ids=lambda error: error.__name__)
@pytest.mark.parametrize("when", ["import", "install", "threads"])
def test_what_a_signal_handler_raises_while_a_host_is_patched(
    patch: Patch, package: Write, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], when: str
) -> None:
    """As SIGTERM's that ends the program, or a time limit's."""
    raised = error("now")

    def handler(*_: object) -> None:
        raise raised

    def interrupt(*_: object) -> None:
        signal.raise_signal(signal.SIGUSR1)

    package(HOST, "")
    if when == "install":
        monkeypatch.setenv("CTXFIX_DISABLE", "1")
        importlib.import_module(HOST)
        monkeypatch.delenv("CTXFIX_DISABLE")
    if when == "threads":
        sys.modules["ctxfix.threads"].apply = interrupt  # type: ignore[method-assign]
    else:
        patch.apply = interrupt  # type: ignore[method-assign]
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(error) as caught:
            _startup.install() if when == "install" else importlib.import_module(HOST)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert caught.value is raised and _startup.failures == {}


def test_a_target_that_another_thread_imports_in_vain(patch: Patch, package: Write) -> None:
    """The error is that thread's. Here there is nothing to patch, and the other targets have their turn."""
    package(HOST, "import builtins; builtins.fake_half.set(); builtins.fake_go.wait(20); raise OSError('the host')")
    package("fakeother.api", "")
    other = importlib.import_module("fakeother.api")
    _startup.TARGETS["fakeother.api"] = "fakepatch"
    builtins.fake_half, builtins.fake_go = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def imports() -> None:
        try:
            importlib.import_module(HOST)
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=imports)
    thread.start()
    assert builtins.fake_half.wait(20)
    going = threading.Timer(0.3, builtins.fake_go.set)
    going.start()
    assert activation._patch("fakepatch") == {HOST: "pending", "fakeother.api": "patched"}
    thread.join(20)
    going.join(20)
    del builtins.fake_half, builtins.fake_go
    assert len(errors) == 1 and patch.modules == [other] and _startup.failures == {}


def test_activate_where_threads_cannot_be_hooked(patch: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise PatchError("no method start")

    sys.modules["ctxfix.threads"].apply = fail  # type: ignore[method-assign]
    assert ctxfix.activate()
    assert "no method start" in _startup.failures["hooking Python threads"]
    monkeypatch.setenv("CTXFIX_STRICT", "1")
    with pytest.raises(PatchError, match="no method start"):
        ctxfix.activate()


def test_a_logging_set_up_that_fails_at_a_bad_setting() -> None:
    code = """
import logging, ctxfix

class Broken(logging.Filter):
    def filter(self, record):
        raise RuntimeError("the application's filter")

logging.getLogger("ctxfix").addFilter(Broken())
from ctxfix import guard
assert ctxfix.stats()["hook_failures"] == 1
"""
    environment = clean_environment(PYTHONPATH=str(Path(ctxfix.__file__).parent.parent), CTXFIX_SYNC_MEMOPS="nonsense")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("startup_state")
def test_patched_anew_after_somebody_had_wrapped_on_top(
    patch: Patch, package: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All the other hooks had been taken off: 'patched' would be a lie until they are on again."""
    package(HOST, "")
    module = importlib.import_module(HOST)
    patch.wrapped_on_top = True
    with pytest.raises(PatchError):
        activation._unpatch(_startup.TARGETS[HOST])
    module.patched = False
    assert activation._patch(_startup.TARGETS[HOST])[HOST] == "patched" and module.patched


def test_activate_raises_in_strict_mode(patch: Patch, package: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    package(HOST, "")
    patch.error = ValueError("broken")
    importlib.import_module(HOST)
    monkeypatch.setenv("CTXFIX_STRICT", "1")
    with pytest.raises(PatchError, match="broken"):
        ctxfix.activate()


def test_public_names_resolve_on_first_use() -> None:
    assert set(ctxfix.__all__) <= set(dir(ctxfix))
    assert set(ctxfix.__all__) == set(ctxfix._HOMES)
    assert callable(ctxfix.status) and callable(ctxfix.stats) and callable(ctxfix.bound)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        ctxfix.nonsense  # noqa: B018


def test_public_name_whose_module_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ctxfix.affinity", None)
    monkeypatch.delitem(vars(ctxfix), "bound", raising=False)
    assert not hasattr(ctxfix, "bound")
    with pytest.raises(AttributeError, match=r"ctxfix\.bound cannot be loaded in .*python"):
        ctxfix.bound  # noqa: B018


def test_threads_are_hooked_with_the_first_host(patch: Patch, package: Write, caplog: pytest.LogCaptureFixture) -> None:
    calls = []
    sys.modules["ctxfix.threads"].apply = lambda: calls.append(True)  # type: ignore[method-assign]
    package(HOST, "")
    importlib.import_module(HOST)
    assert calls == [True]


def test_threads_that_cannot_be_hooked_do_not_undo_the_host(patch: Patch, package: Write) -> None:
    def fail() -> None:
        raise PatchError("no method start")

    sys.modules["ctxfix.threads"].apply = fail  # type: ignore[method-assign]
    package(HOST, "")
    assert importlib.import_module(HOST).patched
    assert _startup.outcomes[HOST] == "patched"
    assert "no method start" in _startup.failures["hooking Python threads"]


def test_importing_ctxfix_imports_nothing_else() -> None:
    code = "import os, sys; before = set(sys.modules); import ctxfix; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            f"import sys; sys.path.append({str(Path(ctxfix.__file__).parent.parent)!r}); {code}",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["ctxfix", "ctxfix._startup"], done.stderr
