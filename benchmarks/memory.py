# SPDX-License-Identifier: Apache-2.0
"""What ctxfix takes of memory: of the host's in MiB at each stage of a process, and of each GPU's.

    python benchmarks/memory.py [--gpu]

Each stage is a new process, with ctxfix on and with CTXFIX_DISABLE=1 in turn: an interpreter that does nothing; NIXL
imported; 1,000 and 100,000 ranges registered. Given is the private memory (USS) that it has more with ctxfix on, the
median of five. On the rig: real NIXL, fake CUDA. With --gpu instead, on real GPUs: a process that uses the last GPU and
makes two NIXL agents on a bare thread, and what NVML says that each GPU then holds more. None of that may be ctxfix's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from results import write

RIG = Path(__file__).resolve().parents[1] / "integration" / "rig"
ROUNDS = 5

#: In the process: its private memory, as the kernel counts it.
_USS = """
import sys
def uss():
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("Private_")) / 1024
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


def on_the_rig() -> int:
    sys.path.insert(0, str(RIG))
    from rig import Rig

    rig = Rig.prepare()
    rows: dict[str, float] = {}
    for stage, code in STAGES.items():
        added = []
        for _ in range(ROUNDS):
            pair = []
            for disable in ("1", ""):
                environment = rig.env("1.4.0", CTXFIX_DISABLE=disable)
                environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], str(RIG)])
                command = [
                    sys.executable,
                    "-c",
                    f"{_USS}\n{code}\nprint('USS', uss(), flush=True)\nimport os\nos._exit(0)",
                ]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
                said = [line for line in done.stdout.splitlines() if line.startswith("USS")]
                if not said:
                    raise SystemExit(f"{stage}: {done.stderr[-2000:]}")
                pair.append(float(said[0].split()[1]))
            added.append(pair[1] - pair[0])
            if not code:
                rows["an interpreter without ctxfix, in all"] = pair[0]
        rows[f"added to: {stage}"] = statistics.median(added)
    write("memory", "Private memory", "MiB", rows, {"rounds": ROUNDS, "nixl": "1.4.0", "driver": "the rig's fake"})
    return 0


def on_gpus(backend: str) -> int:
    import json

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
    options = parser.parse_args()
    return on_gpus(options.backend) if options.gpu else on_the_rig()


if __name__ == "__main__":
    sys.exit(main())
