# SPDX-License-Identifier: Apache-2.0
"""How fast, and by which path, a thread that set no device moves GPU memory to another process.

Each case is BYTES/COUNT: that many bytes in that many descriptors of equal size. The sums of all bytes on both sides
are compared after each transfer.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from common import case, descriptors, make_agent, print_result, run_pair, transfer, used_mib


def checksum(buffer: Any) -> int:
    """Of every byte; the sum wraps, on both sides alike."""
    import torch

    whole = buffer.numel() // 8 * 8
    return int(buffer[:whole].view(torch.int64).sum()) + int(buffer[whole:].to(torch.int64).sum())


def set_allocator(role: str, a: dict[str, Any]) -> None:
    """PyTorch reads this once, when it allocates for the first time."""
    if a["expandable"] in (role, "both"):
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


def receiver(pipe: Connection, a: dict[str, Any]) -> dict[str, Any]:
    set_allocator("receiver", a)
    import torch

    torch.cuda.set_device(a["dst"])
    size = max(size for size, _ in a["cases"])
    buffer = torch.zeros(size, dtype=torch.uint8, device=f"cuda:{a['dst']}")
    agent = make_agent("receiver", a["backend"])
    agent.register_memory([(buffer.data_ptr(), size, a["dst"], "")], "VRAM")
    torch.cuda.synchronize()
    pipe.send((agent.get_agent_metadata(), buffer.data_ptr()))
    while (wanted := pipe.recv()) is not None:
        pipe.send(checksum(buffer[:wanted]))
        buffer.zero_()
        torch.cuda.synchronize()
        pipe.send("zeroed")
    return {}


def sender(pipe: Connection, a: dict[str, Any]) -> dict[str, Any]:
    set_allocator("sender", a)
    import torch

    torch.cuda.set_device(a["src"])
    size = max(size for size, _ in a["cases"])
    buffer = torch.randint(0, 255, (size,), dtype=torch.uint8, device=f"cuda:{a['src']}")
    sums = {used: checksum(buffer[:used]) for used, _ in a["cases"]}
    agent = make_agent("sender", a["backend"])
    agent.register_memory([(buffer.data_ptr(), size, a["src"], "")], "VRAM")
    metadata, remote = pipe.recv()
    agent.add_remote_agent(metadata)
    agent.make_connection("receiver")
    time.sleep(1)  # the handshake of NIXL's libfabric plugin ends on its own thread
    report: dict[str, Any] = {"cases": [], "used_mib_idle": used_mib()}

    def post() -> None:
        for used, count in a["cases"]:
            rows = []
            for round_ in range(a["rounds"]):
                local = descriptors(agent, buffer.data_ptr(), used // count, count, a["src"])
                target = descriptors(agent, remote, used // count, count, a["dst"])
                handle = agent.initialize_xfer("WRITE", local, target, "receiver", b"done%d" % round_)
                state, post_ms, ms = transfer(agent, handle)
                agent.release_xfer_handle(handle)
                pipe.send(used)
                rows.append({"state": state, "post_ms": post_ms, "ms": ms, "bytes_right": pipe.recv() == sums[used]})
                pipe.recv()
                report.setdefault("used_mib_first", used_mib())
            report["cases"].append({"bytes": used, "count": count, "transfers": rows})

    thread = threading.Thread(target=post, name="transfer_worker")
    thread.start()
    thread.join()
    report["used_mib_last"] = used_mib()
    pipe.send(None)
    return report


def reference(a: dict[str, Any]) -> dict[str, Any]:
    """Plain torch copies of the largest case: the limit of the machine, best of ten in ms."""
    import torch

    size = max(size for size, _ in a["cases"])
    source = torch.empty(size, dtype=torch.uint8, device=f"cuda:{a['src']}")
    target = torch.empty(size, dtype=torch.uint8, device=f"cuda:{a['dst']}")
    best = float("inf")
    for _ in range(10):
        torch.cuda.synchronize(a["src"])
        torch.cuda.synchronize(a["dst"])
        start = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(a["src"])
        torch.cuda.synchronize(a["dst"])
        best = min(best, (time.perf_counter() - start) * 1e3)
    return {"reference_ms": best, "bytes": size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--src", type=int, default=1)
    parser.add_argument("--dst", type=int, default=1)
    parser.add_argument("--backend", default="LIBFABRIC")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", type=case, nargs="+", default=[case("2147483648/8"), case("254803968/321")])
    parser.add_argument(
        "--expandable",
        choices=["none", "sender", "receiver", "both"],
        default="none",
        help="whose memory is made of expandable segments, which no CUDA IPC can export",
    )
    parser.add_argument("--reference", action="store_true")
    parser.add_argument("--limit", type=float, default=150, help="seconds")
    a = vars(parser.parse_args())
    if a["reference"]:
        print_result(reference(a))
    else:
        print_result(run_pair(sender, receiver, a, a["limit"]))


if __name__ == "__main__":
    main()
