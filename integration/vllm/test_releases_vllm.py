# SPDX-License-Identifier: Apache-2.0
"""What ctxfix hooks is where it should be in releases of vLLM, old and new. Their source is parsed, not imported."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from host_environments import unpack

from ctxfix.patches import vllm as patch

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

PUSH, OLD, WORKER, TRAINER = patch.PUSH, patch.OLD, patch.RDT_WORKER, patch.RDT_TRAINER
#: release -> which of the hooked modules it has, and whether its handshake executor sets the device itself
RELEASES = {
    "0.9.2": ({OLD}, False),
    "0.14.1": ({OLD}, False),
    "0.18.1": ({OLD}, True),
    "0.22.1": (set(), True),
    "0.26.0": ({PUSH}, True),
    "0.30.0": ({PUSH, WORKER, TRAINER}, True),
    "0.33.0": ({PUSH, WORKER, TRAINER}, True),
}


def methods(source: Path) -> dict[str, ast.FunctionDef]:
    """The methods of a module's classes, as "Class.method"."""
    found = {}
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.ClassDef):
            found.update({f"{node.name}.{f.name}": f for f in node.body if isinstance(f, ast.FunctionDef)})
    return found


@pytest.mark.parametrize("release", RELEASES)
def test_the_hooked_methods_are_there(release: str) -> None:
    modules, handshake_sets_device = RELEASES[release]
    files = unpack(f"vllm=={release}", "vllm/distributed/*.py")
    hooked = {hook.module for hook in patch._host.hooks}
    for module in hooked:
        source = files / (module.replace(".", "/") + ".py")
        assert source.exists() == (module in modules), module
        if module in modules:
            present = methods(source)
            missing = [h.method for h in patch._host.hooks if h.module == module and h.method not in present]
            assert not missing
    connectors = files / "vllm/distributed/kv_transfer/kv_connector/v1"
    sources = [path for path in connectors.rglob("*.py") if "nixl" in str(path.relative_to(connectors))]
    handshakes = [m for source in sources for name, m in methods(source).items() if name.endswith("._nixl_handshake")]
    assert handshakes
    assert any("set_device" in ast.unparse(handshake) for handshake in handshakes) == handshake_sets_device
