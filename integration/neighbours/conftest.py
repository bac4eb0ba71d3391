# SPDX-License-Identifier: Apache-2.0
"""The same command twice: with ctxfix's hooks on, and with CTXFIX_DISABLE=1."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "rig")]

from host_environments import TORCH, Environment, prepare  # noqa: E402
from missing import or_skip  # noqa: E402
from rig import Rig  # noqa: E402

NIXL = "1.4.0"
NEIGHBOURS = (
    "gevent==26.9.0",
    "opentelemetry-instrumentation-threading==0.66b1",
    "opentelemetry-sdk==1.45.1",
    "ddtrace==4.16.0",
    "coverage==7.17.5",
    "pytest==9.2.0",
    "pytest-xdist==3.8.0",
)

Twice = Callable[..., tuple["subprocess.CompletedProcess[str]", "subprocess.CompletedProcess[str]"]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.neighbours)
            item.add_marker(pytest.mark.timeout(1200))  # any may be the first, and install all that is needed


@pytest.fixture(scope="session")
def rig() -> Rig:
    return or_skip(Rig.prepare)


@pytest.fixture(scope="session")
def environments() -> Callable[[bool], Environment]:
    """The environment with torch, or the one with all the others."""
    made: dict[bool, Environment] = {}

    def get(torch: bool) -> Environment:
        if torch not in made:
            made[torch] = prepare("neighbours-torch", TORCH) if torch else prepare("neighbours", *NEIGHBOURS)
        return made[torch]

    return get


@pytest.fixture
def twice(rig: Rig, environments: Callable[[bool], Environment], tmp_path: Path) -> Twice:
    """Run ``python ARGUMENTS…`` in two fresh folders: what it said with the hooks on, and without."""

    def run(
        *arguments: str, limit: float = 400, torch: bool = False, **variables: str
    ) -> tuple[subprocess.CompletedProcess[str], ...]:
        environment = environments(torch)
        done = []
        for name, switch in (("with", {}), ("without", {"CTXFIX_DISABLE": "1"})):
            folder = tmp_path / name
            folder.mkdir(exist_ok=True)
            env = rig.env(NIXL, torch_stub=False, **switch, **variables)
            env["PYTHONPATH"] = os.pathsep.join([str(HERE / "active"), env["PYTHONPATH"]])
            env["PATH"] = os.pathsep.join([str(environment.python.parent), str(environment.bare.parent), env["PATH"]])
            command = [str(environment.python), *arguments]
            # Its children go with it, whatever becomes of it.
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            try:
                out, err = process.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                pytest.fail(f"{name} ctxfix: no end after {limit} s: {arguments}")
            finally:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                process.wait()
            done.append(subprocess.CompletedProcess(command, process.returncode, out, err))
        return tuple(done)

    return run  # type: ignore[return-value]
