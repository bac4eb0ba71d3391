# SPDX-License-Identifier: Apache-2.0
"""What the two programs of this folder share: a program that moves GPU memory with NIXL, as any user would write it."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

MIB = 1 << 20


def api() -> Any:
    """NIXL's Python module for the CUDA 13 wheels, or for CUDA 12."""
    try:
        return importlib.import_module("nixl_cu13._api")
    except ModuleNotFoundError:
        return importlib.import_module("nixl_cu12._api")


def make_agent(name: str, backend: str) -> Any:
    nixl = api()
    return nixl.nixl_agent(name, nixl.nixl_agent_config(backends=[backend]))


def used_mib() -> list[int]:
    """Memory in use on each GPU of the machine in MiB, by all processes (NVML)."""
    import pynvml

    pynvml.nvmlInit()
    handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
    return [pynvml.nvmlDeviceGetMemoryInfo(handle).used // MIB for handle in handles]


def case(text: str) -> tuple[int, int]:
    """BYTES/COUNT of the command line: bytes, a multiple of count, and how many descriptors of equal size."""
    size, count = map(int, text.split("/"))
    return size // count * count, count


def transfer(agent: Any, handle: Any, limit_s: float = 60) -> tuple[str, float, float]:
    """Post and wait: the final state, the time of the post and of the whole in ms. NIXL itself never gives up."""
    start = time.perf_counter()
    state = agent.transfer(handle)
    posted = time.perf_counter()
    while state == "PROC":
        state = agent.check_xfer_state(handle)
        if time.perf_counter() - start > limit_s:
            state = "TIMEOUT"
    return state, (posted - start) * 1e3, (time.perf_counter() - start) * 1e3


def descriptors(agent: Any, address: int, step: int, count: int, device: int) -> Any:
    return agent.get_xfer_descs([(address + i * step, step, device) for i in range(count)], "VRAM")


def run_pair(
    sender: Callable[..., None], receiver: Callable[..., None], arguments: dict[str, Any], limit_s: float
) -> dict[str, Any]:
    """Run both in fresh processes joined by a pipe; each reports a dict through a queue of its own."""
    context = multiprocessing.get_context("spawn")
    left, right = context.Pipe()
    reports: Any = context.Queue()
    result: dict[str, Any] = {"used_mib_before": used_mib()}
    processes = [
        context.Process(target=_guarded, args=(receiver, right, reports, "receiver", arguments)),
        context.Process(target=_guarded, args=(sender, left, reports, "sender", arguments)),
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + limit_s
    received: dict[str, Any] = {}
    while len(received) < 2 and time.monotonic() < deadline:
        try:
            role, report = reports.get(timeout=1)
            received[role] = report
        except Exception:  # noqa: BLE001 - queue.Empty of the context's own kind
            if not any(process.is_alive() for process in processes):
                break
    for process in processes:
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()
    result["exit_codes"] = [process.exitcode for process in processes]
    for role in ("sender", "receiver"):
        result[role] = received.get(role, {"error": "no report"})
    return result


def _guarded(
    body: Callable[[Connection, dict[str, Any]], dict[str, Any]],
    pipe: Connection,
    reports: Any,
    role: str,
    arguments: dict[str, Any],
) -> None:
    try:
        reports.put((role, body(pipe, arguments)))
    except BaseException as error:  # noqa: BLE001 - a report of any kind beats silence
        reports.put((role, {"error": repr(error)}))
        raise


def print_result(result: dict[str, Any]) -> None:
    """The one line that the runner reads."""
    print("RESULT " + json.dumps(result), flush=True)
