# SPDX-License-Identifier: Apache-2.0
"""vLLM's own classes on the rig: its Python code, without its kernels, and the packages that it imports here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "rig")]

import host_environments  # noqa: E402
from missing import or_skip  # noqa: E402
from rig import Rig  # noqa: E402

VLLM, RAY = "0.33.0", "2.60.0"
# What vLLM's connector and weight transfer import, of the eighty packages that its wheel asks for.
NEEDS = """aiohttp blake3 cachetools cbor2 cloudpickle einops fastapi huggingface_hub llguidance msgspec openai
openai_harmony partial_json_parser pillow prometheus_client psutil py-cpuinfo pybase64 pydantic pyzmq regex
transformers>=5.16.1,<5.21 uvloop xgrammar==0.2.8""".split()


@pytest.fixture(scope="session")
def rig() -> Rig:
    return or_skip(Rig.prepare)


@pytest.fixture(scope="session")
def environment() -> host_environments.Environment:
    return host_environments.prepare(
        f"vllm-{VLLM}", f"ray=={RAY}", host_environments.TORCH, *NEEDS, without_dependencies=("nixl==1.1.0",)
    )


@pytest.fixture(scope="session")
def vllm() -> Path:
    """The folder with vLLM's Python code."""
    return host_environments.unpack(f"vllm=={VLLM}", "*.py", "*/METADATA")
