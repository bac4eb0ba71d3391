# SPDX-License-Identifier: Apache-2.0
"""Runs path.py and stale.py over NIXL and libfabric releases, with and without ctxfix, and prints a table.

    python integration/gpu/run.py --pair DIR_OF_NIXL:DIR_OF_LIBFABRIC … --out results.json

DIR_OF_NIXL holds the package nixl_cu13 (or nixl_cu12) and its libraries, DIR_OF_LIBFABRIC libfabric.so.1 (itself or in
lib/) and include/. Further library folders: --libraries. Needs two NVIDIA GPUs with peer access, torch, pynvml and a C
compiler. "Without" is the same program with CTXFIX_DISABLE=1.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROUTES = ("1:1", "1:0", "0:0")


def library_folder(libfabric: Path) -> Path:
    for folder in (libfabric, libfabric / "lib"):
        if (folder / "libfabric.so.1").exists():
            return folder
    raise SystemExit(f"no libfabric.so.1 in {libfabric}")


def fabric_abi(nixl: Path) -> str:
    """The newest symbol version of libfabric that NIXL's plugin asks for."""
    for plugin in nixl.rglob("libplugin_LIBFABRIC.so"):
        found = re.findall(rb"FABRIC_1\.(\d+)\0", plugin.read_bytes())
        return f"FABRIC_1.{max(map(int, found))}"
    raise SystemExit(f"no libplugin_LIBFABRIC.so under {nixl}")


def version_of(nixl: Path) -> str:
    for metadata in nixl.glob("nixl_cu1*.dist-info"):
        return metadata.name.split("-")[1].removesuffix(".dist")
    return nixl.name


def build_fabric(libfabric: Path, folder: Path) -> Path:
    target = folder / f"fabric-{libfabric.name}.so"
    include = next(d / "include" for d in (libfabric, libfabric.parent) if (d / "include" / "rdma").is_dir())
    command = ["cc", "-std=gnu11", "-O2", "-fPIC", "-shared", f"-I{include}", str(HERE / "fabric.c")]
    subprocess.run([*command, "-o", str(target), "-ldl"], check=True)
    return target


def merged(counts: list[Path]) -> dict[str, dict[str, int]]:
    total: dict[str, dict[str, int]] = {}
    for path in counts:
        for name, rows in json.loads(path.read_text()).items():
            for device, number in rows.items():
                of = total.setdefault(name, {})
                of[device] = of.get(device, 0) + number
    return total


def reference(src: int, dst: int) -> dict[str, Any]:
    """A plain torch copy of the largest case, in a process without ctxfix."""
    command = [sys.executable, str(HERE / "path.py"), "--reference", "--src", str(src), "--dst", str(dst)]
    environment = {**os.environ, "CTXFIX_DISABLE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    line = next((text for text in done.stdout.splitlines() if text.startswith("RESULT ")), None)
    return dict(json.loads(line[7:])) if line else {"error": done.stderr[-2000:]}


class Bench:
    """One pair of NIXL and libfabric."""

    def __init__(self, pair: str, a: argparse.Namespace, folder: Path) -> None:
        self.nixl, self.libfabric = (Path(part).resolve() for part in pair.split(":"))
        self.a = a
        self.folder = folder
        self.name = f"NIXL {version_of(self.nixl)}, {self.libfabric.name}"
        self.libraries = library_folder(self.libfabric)
        self.preload = getattr(a, "preload", None) or build_fabric(self.libfabric, folder)
        self.abi = fabric_abi(self.nixl)

    def environment(self, ctxfix: bool, counts: Path) -> dict[str, str]:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(self.nixl), os.environ.get("PYTHONPATH", "")])),
            "LD_LIBRARY_PATH": os.pathsep.join(
                filter(None, [str(self.libraries), *self.a.libraries, os.environ.get("LD_LIBRARY_PATH", "")])
            ),
            "LD_PRELOAD": str(self.preload),
            "FABRIC_ABI": self.abi,
            "FABRIC_COUNTS": str(counts),
        }
        environment.pop("CTXFIX_DISABLE", None)
        if not ctxfix:
            environment["CTXFIX_DISABLE"] = "1"
        return environment

    def run(
        self, program: str, ctxfix: bool, *arguments: str, limit_s: float, variables: dict[str, str] | None = None
    ) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(dir=self.folder) as counts:
            launcher = shlex.split(self.a.launcher) if ctxfix else []
            command = [sys.executable, str(HERE / program), *arguments, "--limit", str(limit_s)]
            try:
                done = subprocess.run(
                    [*launcher, *command],
                    env={**self.environment(ctxfix, Path(counts) / "counts"), **(variables or {})},
                    capture_output=True,
                    text=True,
                    timeout=limit_s + 60,
                )
                output, errors = done.stdout, done.stderr
            except subprocess.TimeoutExpired as error:
                output, errors = "", f"timed out: {error}"
            line = next((text for text in output.splitlines() if text.startswith("RESULT ")), None)
            result: dict[str, Any] = json.loads(line[7:]) if line else {"error": "no result"}
            result.update(
                pair=self.name,
                ctxfix=ctxfix,
                program=program,
                command=shlex.join(command),
                fabric=merged(sorted(Path(counts).glob("counts.*"))),
                stderr=errors[-self.a.stderr :],
            )
            return result


def grown(result: dict[str, Any]) -> int | None:
    """MiB by which GPU 0 grew from before the first process to after the last transfer."""
    try:
        growth: int = result["sender"]["used_mib_last"][0] - result["used_mib_before"][0]
        return growth
    except KeyError:
        return None


def path_lines(result: dict[str, Any], route: str) -> list[str]:
    lines = []
    head = f"{result['pair']:32} {'with' if result['ctxfix'] else 'without':8} {route:5}"
    for case in result.get("sender", {}).get("cases", []):
        rows = case["transfers"]
        right = all(row["bytes_right"] and row["state"] == "DONE" for row in rows)
        lines.append(
            f"{head} {case['bytes'] / 1e6:7.0f} MB /{case['count']:4}  first {rows[0]['ms']:8.2f}"
            f"  best {min(row['ms'] for row in rows):8.2f} ms  bytes {'right' if right else 'WRONG'}"
            f"  GPU0 +{grown(result)} MiB  {result['fabric']}"
        )
    return lines or [f"{head} FAILED {result.get('sender')} {result.get('receiver')} {result['stderr'][-300:]}"]


def stale_line(result: dict[str, Any], route: str) -> str:
    head = f"{result['pair']:32} {'with' if result['ctxfix'] else 'without':8} {route:5}"
    got = result.get("receiver", {})
    if "stale" not in got:
        return f"{head} FAILED {result.get('sender')} {got} {result['stderr'][-300:]}"
    return f"{head} stale {got['stale']}  torn {got['torn']}  of {got['rounds']}  {result['sender'].get('states')}"


def machine() -> dict[str, Any]:
    import pynvml
    import torch

    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    return {
        "gpus": [pynvml.nvmlDeviceGetName(handle) for handle in handles],
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernel": platform.release(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", action="append", required=True, metavar="NIXL:LIBFABRIC")
    parser.add_argument("--libraries", action="append", default=[], help="more folders of libraries")
    parser.add_argument("--out", type=Path, default=Path("gpu-results.json"))
    parser.add_argument("--programs", nargs="+", default=["path", "stale"], choices=["path", "stale"])
    parser.add_argument("--routes", nargs="+", default=list(ROUTES), help="SRC:DST devices")
    parser.add_argument("--ctxfix", default="both", choices=["both", "with", "without"])
    parser.add_argument("--launcher", default="", help="put before the program in runs with ctxfix: 'ctxfix run --'")
    parser.add_argument("--backend", default="LIBFABRIC")
    parser.add_argument("--cases", nargs="+", help="BYTES/COUNT, for path.py")
    parser.add_argument("--rounds", type=int, default=5, help="transfers a case, for path.py")
    parser.add_argument("--stale-cases", nargs="+", help="BYTES/COUNT, for stale.py")
    parser.add_argument("--small", type=int, default=0, help="pieces of 4 KiB before those of a transfer, for stale.py")
    parser.add_argument("--stale-rounds", type=int, default=2000)
    parser.add_argument("--stale-rounds-without", type=int, default=50)
    parser.add_argument("--stderr", type=int, default=2000, help="characters of it to keep a run")
    a = parser.parse_args()
    results: list[dict[str, Any]] = []
    record: dict[str, Any] = {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "results": results,
    }

    def keep(result: dict[str, Any], lines: list[str]) -> None:
        results.append(result)
        print("\n".join(lines), flush=True)
        a.out.write_text(json.dumps(record, indent=1))

    modes = {"both": (False, True), "with": (True,), "without": (False,)}[a.ctxfix]
    with tempfile.TemporaryDirectory() as folder:
        benches = [Bench(pair, a, Path(folder)) for pair in a.pair]
        for route in a.routes if "path" in a.programs else ():
            src, dst = map(int, route.split(":"))
            plain = {**reference(src, dst), "program": "reference", "route": route}
            keep(plain, [f"plain torch copy {route}: {plain.get('reference_ms', float('nan')):.2f} ms"])
        for bench in benches:
            for route in a.routes:
                src, dst = route.split(":")
                ends = ["--src", src, "--dst", dst, "--backend", a.backend]
                for ctxfix in modes:
                    if "path" in a.programs:
                        more = ["--rounds", str(a.rounds), *(["--cases", *a.cases] if a.cases else [])]
                        result = bench.run("path.py", ctxfix, *ends, *more, limit_s=150)
                        keep(result, path_lines(result, route))
                    if "stale" in a.programs:
                        rounds = a.stale_rounds if ctxfix else a.stale_rounds_without
                        more = ["--rounds", str(rounds), "--small", str(a.small)]
                        more += ["--cases", *a.stale_cases] if a.stale_cases else []
                        result = bench.run("stale.py", ctxfix, *ends, *more, limit_s=300)
                        keep(result, [stale_line(result, route)])


if __name__ == "__main__":
    main()
