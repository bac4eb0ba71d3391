# SPDX-License-Identifier: Apache-2.0
"""The article's load on real GPUs: SGLang's KV managers, TP 2, four processes; as shipped, one line more, ctxfix.

    python integration/sglang/gpu.py --pair nixl-1.1.0:libfabric-2.4.0 --sglang sglang-0.5.12.post1:packages

Each request is 8,192 tokens of DeepSeek-V2-Lite's KV cache (27 layers, 1,152 bytes a token and layer, 255 MB). They
arrive once a second on average for 20 s, then follow one another. No weights, no model run. Needs two NVIDIA GPUs with
peer access, torch, pynvml and a C compiler; NIXL and libfabric as integration/gpu/README.md says. --sglang names the
folders that hold SGLang and what it imports beyond what is installed; with several --pair it is given once for each.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "gpu"))

from run import build_fabric, fabric_abi, library_folder, machine, version_of  # noqa: E402

#: libfabric's receiver keeps by default so little of its peers' memory mapped (RAM / CPUs / 2) that a KV pool is mapped
#: anew for each request: "+ cache" lets it keep a GPU's worth.
CACHE = {"FI_MR_CACHE_MAX_SIZE": str(160 << 30)}
#: What is compared: name -> (options of kv_transfer.py, whether ctxfix is on, more variables).
COLUMNS: dict[str, tuple[tuple[str, ...], bool, dict[str, str]]] = {
    "as shipped": ((), False, {}),
    "set_device": (("--set-device",), False, {}),
    "ctxfix": ((), True, {}),
    "ctxfix + cache": ((), True, CACHE),
}
PHASES = ("1/s", "back to back")
#: Lines of libfabric's log, by what they say. The first comes once a process, the second for each descriptor.
LINES = {
    "SAR": "unable to use IPC for msg, fallback to using SAR",
    "no range": "Failed to perform cuMemGetAddressRange",
    "no handle": "Failed to perform cudaIpcGetMemHandle",
}


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * share // 1).__trunc__() - 1)] if ordered else float("nan")


def summary(milliseconds: Sequence[float]) -> dict[str, float]:
    return {
        "requests": len(milliseconds),
        "mean": statistics.fmean(milliseconds) if milliseconds else float("nan"),
        "p50": percentile(milliseconds, 0.50),
        "p99": percentile(milliseconds, 0.99),
    }


class Bench:
    """One NIXL with its libfabric, under one SGLang."""

    def __init__(self, pair: str, sglang: str, options: argparse.Namespace, folder: Path) -> None:
        self.nixl, self.libfabric = (Path(part).resolve() for part in pair.split(":"))
        self.modules = [Path(part).resolve() for part in sglang.split(":")]
        self.options, self.folder = options, folder
        self.preload = options.preload or build_fabric(self.libfabric, folder)

    def environment(self, ctxfix: bool, counts: Path) -> dict[str, str]:
        def joined(variable: str, *first: Path | str) -> str:
            return os.pathsep.join(filter(None, [*map(str, first), os.environ.get(variable, "")]))

        environment = {
            **os.environ,
            "PYTHONPATH": joined("PYTHONPATH", self.nixl, *self.modules),
            "LD_LIBRARY_PATH": joined("LD_LIBRARY_PATH", library_folder(self.libfabric), *self.options.libraries),
            "LD_PRELOAD": str(self.preload),
            "FABRIC_ABI": fabric_abi(self.nixl),
            "FABRIC_COUNTS": str(counts),
            "FI_LOG_LEVEL": "warn",
        }
        environment.pop("CTXFIX_DISABLE", None)
        return environment if ctxfix else {**environment, "CTXFIX_DISABLE": "1"}

    def run(self, column: str) -> dict[str, Any]:
        """Run the load once and gather what its ranks, the fabric and libfabric's log say."""
        more, ctxfix, variables = COLUMNS[column]
        options = self.options
        with tempfile.TemporaryDirectory(dir=self.folder) as logs:
            command = [sys.executable, str(HERE / "kv_transfer.py"), "--logs", logs, *more]
            command += ["--memory", options.memory, "--layers", str(options.layers), "--tokens", str(options.tokens)]
            command += ["--runs", str(options.runs), "--rate", str(options.rate), "--seconds", str(options.seconds)]
            command += ["--requests", str(options.requests), "--poll", "0.0001", "--deadline", str(options.limit)]
            command += ["--start-method", options.start_method]
            if options.decode_gpus:
                command += ["--decode-gpus", options.decode_gpus]
            launcher = shlex.split(options.launcher) if ctxfix else []
            result: dict[str, Any] = {"ranks": {}, "error": None}
            try:
                done = subprocess.run(
                    [*launcher, *command],
                    env={**self.environment(ctxfix, Path(logs) / "counts"), **variables},
                    capture_output=True,
                    text=True,
                    timeout=options.limit + 60,
                )
                said = [line for line in done.stdout.splitlines() if line.startswith('{"ranks"')]
                result = json.loads(said[-1]) if said else {**result, "error": f"no result: {done.stderr[-2000:]}"}
            except subprocess.TimeoutExpired:
                result["error"] = f"no end after {options.limit + 60} s"
            for name, rank in result["ranks"].items():
                self.add_evidence(name, rank, Path(logs))
            logged = {path.stem: path.read_text(errors="replace")[-2000:] for path in Path(logs).glob("*.log")}
        return {
            "nixl": version_of(self.nixl),
            "libfabric": self.libfabric.name,
            "column": column,
            "command": shlex.join(command),
            "log_tails": logged,
            **result,
        }

    @staticmethod
    def add_evidence(name: str, rank: dict[str, Any], logs: Path) -> None:
        text = (logs / f"{name}.log").read_text(errors="replace")
        rank["log"] = {what: text.count(line) for what, line in LINES.items()}
        counts = logs / f"counts.{rank['pid']}"
        rank["fabric"] = json.loads(counts.read_text()) if counts.exists() else {}
        rank["transfer"] = {phase: summary(times) for phase, times in zip(PHASES, rank["milliseconds"], strict=True)}
        # A request's KV cache alone, from its post to its completion; the other transfers are of metadata.
        moved = [transfer for transfer in rank.pop("transfers") if transfer[0] > 1]
        first = len(rank["milliseconds"][0])
        rank["kv"] = {
            phase: summary([ms for *_, ms in part])
            for phase, part in zip(PHASES, (moved[:first], moved[first:]), strict=True)
        }


def lines(result: dict[str, Any]) -> list[str]:
    """A row for each rank of a run."""
    head = f"{result.get('sglang', ''):13} NIXL {result['nixl']:6} {result['column']:14}"
    if result["error"]:
        return [f"{head} FAILED: {str(result['error']).strip().splitlines()[-1]}"]
    idle, last = result["used_mib_before"], [rank["used_mib_last"] for rank in result["ranks"].values()]
    grown = f"GPU 0 {max(row[0] for row in last) - idle[0]:+} MiB" if idle and all(last) else ""
    rows = []
    for name, rank in sorted(result["ranks"].items()):
        times = "  ".join(
            f"{phase} {t['mean']:8.2f} {t['p50']:8.2f} {t['p99']:8.2f}" for phase, t in rank["transfer"].items()
        )
        kv = "  ".join(f"{t['p50']:8.2f}" for t in rank["kv"].values())
        stray = [device for device in rank["contexts"] if device != rank["gpu"]]
        rows.append(
            f"{head} {name:9} GPU {rank['gpu']}  ms mean/p50/p99: {times}  KV p50 {kv}  log {rank['log']}"
            f"  fabric {rank['fabric']}  contexts on other GPUs {stray}"
            f"  early {len(rank['early'])}  wrong {len(rank['wrong'])}"
        )
    return [*rows, f"{head} {grown}"] if grown else rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", action="append", required=True, metavar="NIXL:LIBFABRIC")
    parser.add_argument("--sglang", action="append", required=True, metavar="FOLDER[:FOLDER…]")
    parser.add_argument("--libraries", action="append", default=[], help="more folders of libraries")
    parser.add_argument("--preload", help="a fabric instead of integration/gpu's own, which shows shm as EFA")
    parser.add_argument("--columns", nargs="+", default=list(COLUMNS), choices=COLUMNS)
    parser.add_argument("--launcher", default="", help="put before the program in runs with ctxfix: 'ctxfix run --'")
    parser.add_argument("--decode-gpus", default="", help="GPU of each decode rank: 1,0 crosses them")
    parser.add_argument("--memory", choices=("torch", "rig"), default="torch")
    parser.add_argument("--start-method", choices=("spawn", "forkserver"), default="spawn")
    parser.add_argument("--layers", type=int, default=27)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument(
        "--runs", type=int, default=6, help="of neighbouring slots; 6 make 324 posts, the article counted 321"
    )
    parser.add_argument("--rate", type=float, default=1)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--requests", type=int, default=20, help="that follow one another")
    parser.add_argument("--limit", type=float, default=150, help="seconds for each run")
    parser.add_argument("--out", type=Path, default=Path("sglang-gpu.json"))
    options = parser.parse_args()
    if len(options.sglang) not in (1, len(options.pair)):
        parser.error("give --sglang once, or once for each --pair")
    sglangs = options.sglang * len(options.pair) if len(options.sglang) == 1 else options.sglang

    results: list[dict[str, Any]] = []
    record: dict[str, Any] = {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine() if options.memory == "torch" else {},
        "results": results,
    }
    with tempfile.TemporaryDirectory() as folder:
        for pair, sglang in zip(options.pair, sglangs, strict=True):
            bench = Bench(pair, sglang, options, Path(folder))
            for column in options.columns:
                result = bench.run(column)
                result["sglang"] = next((rank["sglang"] for rank in result["ranks"].values()), "")
                results.append(result)
                print("\n".join(lines(result)), flush=True)
                options.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
