# SPDX-License-Identifier: Apache-2.0
"""The package `nixl` chooses its CUDA 12 or 13 build; from 1.4.0 on also by an imported cuda.bindings. Not by ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from missing import or_skip
from rig import HERE, Rig, _cached, _one_at_a_time, _unpack

# libcuda is in the process, torch with its CUDA 12 only on disk, and the cuda.bindings that is installed is of CUDA 13.
PROGRAM = """
import ctypes, sys
ctypes.CDLL("libcuda.so.1").cuInit(0)
import ctxfix
from ctxfix import driver
try:
    with ctxfix.bound(4096): pass
except ctxfix.UnknownOwnerError:
    assert driver.attached() and driver.primary_contexts() == []
import nixl
print(nixl._api.nixl_agent.__module__, ctxfix.status()["targets"]["nixl_cu12._api"]["state"])
"""


@pytest.mark.rig
@pytest.mark.parametrize("version", ["1.1.0", "1.4.0", "1.5.1"])
def test_cuda_that_we_speak_to_does_not_choose(version: str, tmp_path: Path) -> None:
    rig = or_skip(lambda: Rig.prepare((version,)))
    with _one_at_a_time(rig.root):
        package = _cached(rig.root / f"nixl-meta-{version}", lambda to: _unpack(f"nixl=={version}", to, print))
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text((HERE / "torch_stub" / "torch.py").read_text())
    (tmp_path / "torch" / "version.py").write_text("cuda = '12.8'\n")
    env = rig.env(version, torch_stub=False)
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(package), env["PYTHONPATH"]])
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=60)
    assert (done.stdout.split(), done.returncode) == (["nixl_cu12._api", "patched"], 0), done.stderr
