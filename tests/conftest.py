# SPDX-License-Identifier: Apache-2.0
"""What tests share: virtual environments around one build of the wheel, and a fake CUDA driver."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
from environments import ROOT, Interpreter, make_venv, pip
from fake_cuda import FakeCuda
from fake_nixl import Nixl

# The same examples each time; python -m pytest --hypothesis-profile=long looks harder.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.register_profile("long", max_examples=20_000, stateful_step_count=100, deadline=None)
hypothesis.settings.load_profile("same")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built once."""
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT))
    return next(folder.glob("ctxfix-*.whl"))


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Interpreter:
    """A virtual environment with ctxfix installed, and nothing else."""
    python = make_venv(tmp_path_factory.mktemp("installed"))
    pip("--python", str(python.executable), "install", "--no-deps", "--no-index", str(wheel))
    return python


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Interpreter:
    """A virtual environment without ctxfix, but with a start-up file: Python 3.13 loads a codec to read any."""
    python = make_venv(tmp_path_factory.mktemp("bare"))
    (python.site_packages / "empty.pth").write_text("# nothing\n")
    return python


@pytest.fixture
def startup_state() -> Iterator[None]:
    """Put back what a test does to the import machinery of this process."""
    from ctxfix import _startup

    meta_path, targets, modules = sys.meta_path[:], dict(_startup.TARGETS), set(sys.modules)
    state = [(kept, kept.copy()) for kept in (_startup.outcomes, _startup.failures)]
    unwanted = set(_startup.unwanted)
    yield
    sys.meta_path[:] = meta_path
    for kept, before in [*state, (_startup.TARGETS, targets)]:
        kept.clear()
        kept.update(before)
    _startup.unwanted.clear()
    _startup.unwanted.update(unwanted)
    for name in set(sys.modules) - modules:
        if name.partition(".")[0].startswith("fake"):
            del sys.modules[name]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Write modules of throw-away packages: ``package("fakehost.api", "code")``."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, code: str) -> Path:
        *parents, last = name.split(".")
        folder = tmp_path.joinpath(*parents)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{last}.py"
        path.write_text(code)
        return path

    return write


# ---- the fake CUDA driver in this process ----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def fake_driver() -> FakeCuda:
    """The rig's fake driver, which stays loaded for the rest of the session."""
    from missing import or_skip
    from rig import Rig

    return FakeCuda(or_skip(Rig.driver_only).libraries / "libcuda.so.1")


@pytest.fixture
def cuda(fake_driver: FakeCuda) -> Iterator[FakeCuda]:
    """Four fake GPUs, ctxfix attached to them, no context current, nothing registered, counters at hand."""
    from ctxfix import driver, guard
    from ctxfix.registry import registry

    assert driver.attach(), driver.problem()
    while fake_driver.depth():
        fake_driver.pop()
    registry._clear()
    guard._warned.clear()
    yield fake_driver
    fake_driver.heal()
    while fake_driver.depth():
        fake_driver.pop()
    registry._clear()
    fake_driver.free_all()


@pytest.fixture
def host(cuda: FakeCuda) -> Iterator[Nixl]:
    """NIXL's stand-in under our hooks, on the fake driver."""
    from ctxfix.native import agents
    from ctxfix.patches import nixl, registration

    registration.nixl_switches = False
    registration._watched.clear()
    registration._registering.clear()
    agents._groups.clear()
    host = Nixl(cuda)
    nixl.apply(host.module)
    yield host
    nixl.remove()


@pytest.fixture(scope="session")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with what the C extension is tested against, see native_stub."""
    import native_stub

    folder = tmp_path_factory.mktemp("native")
    native_stub.build(folder)
    return folder
