# SPDX-License-Identifier: Apache-2.0
"""What ctxfix hooks is where it should be in releases of Ray. Their source is parsed, not imported."""

from __future__ import annotations

import ast

import pytest
from host_environments import unpack

from ctxfix.patches import ray as patch

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


@pytest.mark.parametrize("release", ["2.56.0", "2.58.0", "2.60.0"])
def test_the_hooked_methods_are_there(release: str) -> None:
    files = unpack(f"ray=={release}", "ray/experimental/*.py", "ray/_private/*.py")
    for hook in patch._host.hooks:
        tree = ast.parse((files / (hook.module.replace(".", "/") + ".py")).read_text())
        class_name, _, name = hook.method.rpartition(".")
        bodies = [n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == class_name]
        body = bodies[0] if class_name else tree.body
        (function,) = [n for n in body if isinstance(n, ast.FunctionDef) and n.name == name]
        names = [argument.arg for argument in function.args.args]
        assert names[: len(EXPECTED[name])] == EXPECTED[name]


#: The arguments that the patch passes on by position.
EXPECTED = {
    "_make_actor_method_executor": ["self", "method_name", "method"],
    "fetch_multiple_tensors": ["self", "obj_id", "tensor_transport_metadata"],
    "create_empty_tensors_from_metadata": ["tensor_transport_meta"],
}
