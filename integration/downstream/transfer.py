# SPDX-License-Identifier: Apache-2.0
"""The program under test: a rank's prefill sends a buffer of its GPU to the rank's decode, and the bytes are
compared."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import sys
import threading
import time
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from cuda.bindings import driver as cu

SIZE = 1 << 20


def gpu_memory(rank: int, data: bytes) -> int:
    cu.cuInit(0)
    device = rank % int(cu.cuDeviceGetCount()[1])
    cu.cuCtxSetCurrent(cu.cuDevicePrimaryCtxRetain(device)[1])
    address = int(cu.cuMemAlloc(SIZE)[1])
    cu.cuMemcpyHtoD(address, data, SIZE)
    return address


def make_agent(name: str) -> Any:
    module = next(m for m in ("nixl_cu13", "nixl_cu12") if importlib.util.find_spec(m))
    api = import_module(f"{module}._api")
    return api.nixl_agent(name, api.nixl_agent_config(backends=["LIBFABRIC"]))


def decode(rank: int, pipe: Connection) -> None:
    address = gpu_memory(rank, bytes(SIZE))
    agent = make_agent(f"decode{rank}")
    agent.register_memory([(address, SIZE, rank, "")], "VRAM")
    pipe.send((agent.get_agent_metadata(), address))
    while not any(agent.get_new_notifs().values()):
        time.sleep(0.001)
    data = bytearray(SIZE)
    cu.cuMemcpyDtoH(data, address, SIZE)
    pipe.send(data == bytes([rank + 1]) * SIZE)


def prefill(rank: int, pipe: Connection) -> bool:
    address = gpu_memory(rank, bytes([rank + 1]) * SIZE)
    agent = make_agent(f"prefill{rank}")
    agent.register_memory([(address, SIZE, rank, "")], "VRAM")
    metadata, target = pipe.recv()
    peer = agent.add_remote_agent(metadata)
    peer = peer.decode() if isinstance(peer, bytes) else peer

    def send() -> None:
        ours = agent.get_xfer_descs([(address, SIZE, rank)], "VRAM")
        theirs = agent.get_xfer_descs([(target, SIZE, rank)], "VRAM")
        handle = agent.initialize_xfer("WRITE", ours, theirs, peer, b"done")
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)

    thread = threading.Thread(target=send)
    thread.start()
    thread.join()
    return bool(pipe.recv())


def main() -> int:
    rank = int(os.environ["RANK"])
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=decode, args=(rank, theirs))
    process.start()
    right = prefill(rank, ours)
    process.join()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
