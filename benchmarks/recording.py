# SPDX-License-Identifier: Apache-2.0
"""What recording (CTXFIX_RECORD) adds to one transfer of 321 descriptors, with NIXL's own descriptor lists.

    python benchmarks/recording.py [--calls N]

Runs on the rig. The observers are called as they are around NIXL's methods, for a transfer made, posted, polled to its
end and released; records go to a file. The fastest transfer of that shape measured on H200 takes 2.55 ms (NIXL git
head, both ends bound), of which 3 % may be spent.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from results import write

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integration" / "rig"))

DESCRIPTORS, REPETITIONS = 321, 15
TARGET_US = 0.03 * 2550


def measure(calls: int) -> float:
    from nixl_cu12._api import nixlBind

    from ctxfix.evidence import posts, records

    descs = nixlBind.nixlXferDList(nixlBind.VRAM_SEG, [(1 << 20 | i << 12, 1152 * i, 1) for i in range(DESCRIPTORS)])
    best = []
    with tempfile.TemporaryDirectory() as folder:
        writer = records.Writer(f"{folder}/records", "benchmark")
        observer = posts.Observer(writer.write)
        observer.agent(agent := object(), "me", ["LIBFABRIC"])
        for _ in range(REPETITIONS):
            started = time.perf_counter()
            for handle in range(calls):
                observer.made(agent, handle, "WRITE", descs, "you")
                observer.posted(handle, "PROC", 0, 0)
                for _ in range(10):
                    observer.polled(handle, "PROC")
                observer.polled(handle, "DONE")
                observer.forget(handle)
                observer.released(handle, refused=False)
            best.append((time.perf_counter() - started) / calls * 1e6)
    return statistics.median(best)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)  # in the environment of the rig
    options = parser.parse_args()
    if options.inner:
        print(measure(options.calls))
        return 0
    from rig import Rig

    rig, results = Rig.prepare(), {}
    for version in ("1.1.0", "1.4.0"):
        command = [sys.executable, __file__, "--inner", "--calls", str(options.calls)]
        done = subprocess.run(command, env=rig.env(version), capture_output=True, text=True, check=True)
        results[version] = float(done.stdout)
    rows = {f"NIXL {version}": value for version, value in results.items()}
    title = f"Recording one transfer of {DESCRIPTORS} descriptors (target {TARGET_US:.0f} µs)"
    write("recording", title, "µs", rows, {"target": TARGET_US})
    return int(max(results.values()) > TARGET_US)


if __name__ == "__main__":
    sys.exit(main())
