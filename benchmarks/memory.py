# SPDX-License-Identifier: Apache-2.0
"""What ctxfix takes of memory: of the host's in MiB at each stage of a process, and of each GPU's.

    python benchmarks/memory.py [--gpu] [--rounds N]

Each stage is a new process, with ctxfix on and with CTXFIX_DISABLE=1 in turn: an interpreter that does nothing; NIXL
imported; 1,000 and 100,000 ranges registered. Given is the memory that it has more with ctxfix on, private (USS) and in
all (RSS), the median of five. On the rig: real NIXL, fake CUDA. With --gpu instead, on real GPUs: a process that uses
the last GPU and makes two NIXL agents on a bare thread, and what NVML says that each GPU then holds more. None of that
may be ctxfix's. Where NVML shows no GPU this is told, and nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from results import write

RIG = Path(__file__).resolve().parents[1] / "integration" / "rig"

#: In the process: its private memory, and all that it shares too, as the kernel counts them, in MiB.
_MEMORY = """
def mib(kind):
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith(kind)) / 1024
print("MIB", mib("Private_"), mib("Rss"), flush=True)
import os
os._exit(0)
"""
_RANGES = """
import nixl_cu12._api as api
from transfer import GpuMemory
memory = GpuMemory(0, 64 << 20)
agent = api.nixl_agent("memory", api.nixl_agent_config(backends=["LIBFABRIC"]))
step = (64 << 20) // {number}
kept = agent.register_memory([(memory.address + i * step, step, 0, "") for i in range({number})], "VRAM")
"""
STAGES = {
    "an interpreter": "",
    "NIXL imported": "import nixl_cu12._api",
    "1,000 ranges registered": _RANGES.format(number=1_000),
    "100,000 ranges registered": _RANGES.format(number=100_000),
}
_ON_GPU = """
import json, sys, threading
import pynvml, torch
pynvml.nvmlInit()
handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
used = lambda: [pynvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles]
before = used()
gpu = len(handles) - 1
torch.cuda.set_device(gpu)
tensor = torch.ones(64 << 20, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
try:
    import nixl_cu13._api as api
except ModuleNotFoundError:
    import nixl_cu12._api as api
def work():
    agents = [api.nixl_agent(name, api.nixl_agent_config(backends=[sys.argv[1]])) for name in "ab"]
    for agent in agents:
        agent.register_memory(tensor)
threading.Thread(target=work).start()
for thread in threading.enumerate():
    if thread is not threading.current_thread():
        thread.join()
print("USED", json.dumps([after - was for after, was in zip(used(), before)]), flush=True)
import os
os._exit(0)
"""


def on_the_rig(rounds: int) -> int:
    sys.path.insert(0, str(RIG))
    from rig import Rig

    rig = Rig.prepare()

    def measured(code: str, disable: str) -> tuple[float, ...]:
        environment = rig.env("1.4.0", CTXFIX_DISABLE=disable)
        environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], str(RIG)])
        command = [sys.executable, "-c", f"{code}\n{_MEMORY}"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        said = [line for line in done.stdout.splitlines() if line.startswith("MIB")]
        if not said:
            raise SystemExit(done.stderr[-2000:])
        return tuple(map(float, said[0].split()[1:]))

    rows: dict[str, float] = {}
    for stage, code in STAGES.items():
        without, with_it = zip(*[(measured(code, "1"), measured(code, "")) for _ in range(rounds)], strict=True)
        for i, kind in enumerate(("private", "in all")):
            rows[f"{stage}, {kind}: without ctxfix"] = statistics.median(row[i] for row in without)
            more = statistics.median(b[i] - a[i] for a, b in zip(without, with_it, strict=True))
            rows[f"{stage}, {kind}: added"] = more
    write("memory", "Memory of a process", "MiB", rows, {"rounds": rounds, "nixl": "1.4.0", "driver": "the rig's fake"})
    return 0


def no_gpu() -> str:
    """Why no GPU can be measured, or nothing."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return "" if pynvml.nvmlDeviceGetCount() else "NVML shows no GPU"
    except pynvml.NVMLError as error:
        return f"no NVML: {error}"


def on_gpus(backend: str) -> int:
    if reason := no_gpu():
        print(f"memory of GPUs was not measured: {reason}")
        return 0
    rows: dict[str, float] = {}
    for name, disable in (("without ctxfix", "1"), ("with ctxfix", "")):
        environment = {**os.environ, "CTXFIX_DISABLE": disable}
        command = [sys.executable, "-c", _ON_GPU, backend]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        said = [line for line in done.stdout.splitlines() if line.startswith("USED")]
        if not said:
            raise SystemExit(done.stderr[-2000:])
        for gpu, used in enumerate(json.loads(said[0][5:])):
            rows[f"GPU {gpu} {name}"] = used / (1 << 20)
    sys.path.insert(0, str(RIG.parent / "gpu"))
    from run import machine

    details: dict[str, object] = {"backend": backend, "gpus": machine()}
    write("memory-gpu", "Memory of each GPU taken by a process on the last", "MiB", rows, details)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="memory of real GPUs")
    parser.add_argument("--backend", default="UCX", help="NIXL's, with --gpu")
    parser.add_argument("--rounds", type=int, default=5, help="without --gpu")
    options = parser.parse_args()
    return on_gpus(options.backend) if options.gpu else on_the_rig(options.rounds)


if __name__ == "__main__":
    sys.exit(main())
