# SPDX-License-Identifier: Apache-2.0
"""Two real Mooncake engines of one process move GPU memory over TCP, made with or without ``ctxfix.native_threads``."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rig"))

from mooncake.engine import TransferEngine
from transfer import GpuMemory, make_current

import ctxfix

GPU, SIZE = 1, 1 << 20


def engine() -> Any:
    made = TransferEngine()
    assert made.initialize("127.0.0.1:0", "P2PHANDSHAKE", "tcp", "") == 0
    return made


def main() -> None:
    make_current(GPU)
    source, target = GpuMemory(GPU, SIZE), GpuMemory(GPU, SIZE)
    source.fill(bytes(range(256)) * (SIZE // 256))
    inherit = ctxfix.native_threads(source.address) if sys.argv[1] == "native_threads" else contextlib.nullcontext()
    with inherit:
        sender, receiver = engine(), engine()
    assert sender.register_memory(source.address, SIZE) == receiver.register_memory(target.address, SIZE) == 0
    peer = f"127.0.0.1:{receiver.get_rpc_port()}"
    assert sender.transfer_sync_write(peer, source.address, target.address, SIZE) == 0
    print(f"equal={target.read() == source.read()}", flush=True)
    os._exit(0)  # its threads do not end while it is destroyed


if __name__ == "__main__":
    main()
