# SPDX-License-Identifier: Apache-2.0
"""Do threads queue up in ctxfix? Rates of load.py with one thread and with 16, with ctxfix and without, in turns.

    python integration/load/convoy.py [--nixl 1.4.0] [--posts 1600] [--rounds 5] [--json FILE]

A lock convoy would show as a rate of 16 threads that falls behind what one thread does, with ctxfix more than without.
All runs use load.py's own lock, without which NIXL crashes where ctxfix is off. Medians; JSON on stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "rig"))

from rig import Rig  # noqa: E402

THREADS = (1, 16)


def rate(rig: Rig, nixl: str, posts: int, threads: int, ctxfix: bool) -> float:
    env = rig.env(nixl, **({} if ctxfix else {"CTXFIX_DISABLE": "1"}))
    command = [sys.executable, str(HERE / "load.py"), "--own-lock", "--posts", str(posts), "--threads", str(threads)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=True)
    return float(json.loads(done.stdout.splitlines()[-1])["per_second"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nixl", default="1.4.0")
    parser.add_argument("--posts", type=int, default=1600)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rig = Rig.prepare([options.nixl])
    rates: dict[tuple[bool, int], list[float]] = {(on, threads): [] for on in (True, False) for threads in THREADS}
    for _ in range(options.rounds):
        for (on, threads), seen in rates.items():
            seen.append(rate(rig, options.nixl, options.posts, threads, on))
    medians = {key: statistics.median(seen) for key, seen in rates.items()}
    result = {
        "nixl": options.nixl,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "posts": options.posts,
        "rounds": options.rounds,
        "posts_per_second": {
            "with ctxfix" if on else "without": {str(threads): round(medians[on, threads], 1) for threads in THREADS}
            for on in (True, False)
        },
        "16 threads over 1": {
            "with ctxfix" if on else "without": round(medians[on, 16] / medians[on, 1], 2) for on in (True, False)
        },
        "spread": {
            f"{'with' if on else 'without'} {n}": [round(min(s)), round(max(s))] for (on, n), s in rates.items()
        },
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
