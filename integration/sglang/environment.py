# SPDX-License-Identifier: Apache-2.0
"""Prepare what SGLang's real classes need to run on the rig: each release beside its NIXL, on a CPU build of torch.

Made once, in the git-ignored folder .rig/ of the checkout, as folders that a program gets on its PYTHONPATH: one with
requirements.txt (about 2.5 GB), one for each SGLang with what only that release wants, one for each `nixl` package.

    environment = Environment.prepare("0.5.12.post1")
    outcome = environment.transfer(CTXFIX_DISABLE="1")
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "rig"))

from rig import Rig, RigError, Run, _cached, _one_at_a_time, _prepend, _unpack  # noqa: E402

REQUIREMENTS = HERE / "requirements.txt"
#: Its operators are made for a torch with CUDA; SGLang imports it, and calls none of them here.
TORCHVISION = "torchvision==0.28.0"
#: The releases of SGLang that are run, and the NIXL that each is run with.
PAIRS = {"0.5.12.post1": "1.1.0", "0.5.23": "1.4.0"}
#: What a release wants in another version than requirements.txt has.
OWN = {"0.5.12.post1": ("transformers==5.6.0", "tokenizers==0.22.2", "huggingface-hub==1.33.0")}

#: Where a process of kv_transfer.py makes its calls: in SGLang's Python threads, or in NIXL's own.
NATIVE = "native"


@dataclass(frozen=True)
class Outcome(Run):
    """How a run of kv_transfer.py went."""

    @property
    def done(self) -> bool:
        """Whether every request was served and its bytes are right."""
        return bool(self.result["data_ok"]) and not self.result["error"]

    @cached_property
    def _threads(self) -> dict[tuple[int, int], str]:
        ranks = self.result["ranks"].values()
        return {(rank["pid"], int(tid)): name for rank in ranks for tid, name in rank["threads"].items()}

    def seen(self, op: str, rank: str) -> set[tuple[str, int | None, int | None, str]]:
        """Each (thread, owner of the memory, current device, verdict) of the operation `op` in one rank's process.

        "post" stands for writes and reads that the fabric took.
        """
        pid = self.result["ranks"][rank]["pid"]
        return {
            (self._threads.get((r.pid, r.tid), NATIVE), r.owner, r.current, r.verdict)
            for r in self.records
            if r.pid == pid and (r.is_post if op == "post" else r.op == op)
        }

    def gpu_posts(self, rank: str) -> set[tuple[str, int | None, int | None, str]]:
        """The posts of the KV cache: those of host memory carry SGLang's metadata."""
        return {post for post in self.seen("post", rank) if post[3] != "host"}


@dataclass(frozen=True)
class Environment:
    """One SGLang with its NIXL on the rig."""

    sglang: str
    nixl: str
    rig: Rig
    modules: tuple[Path, ...]

    @classmethod
    def prepare(
        cls, sglang: str, report: Callable[[str], None] = lambda line: None, root: Path | None = None
    ) -> Environment:
        """Make what is missing and return the environment; `report` is told each step that takes time.

        Raises RigError, which says what is missing.
        """
        nixl = PAIRS[sglang]
        rig = Rig.prepare((nixl,), report, root)
        tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
        base = hashlib.sha256(REQUIREMENTS.read_bytes() + TORCHVISION.encode()).hexdigest()[:12]
        own = OWN.get(sglang, ())
        parts = {
            f"sglang-{sglang}-{tag}": lambda to: _install(to, report, "--no-deps", f"sglang=={sglang}", *own),
            f"nixl-meta-{nixl}": lambda to: _unpack(f"nixl=={nixl}", to, report),
            f"sglang-base-{base}-{tag}": lambda to: _base(to, report),
        }
        with _one_at_a_time(rig.root):
            modules = tuple(_cached(rig.root / name, make) for name, make in parts.items())
        return cls(sglang, nixl, rig, modules)

    def env(self, *, paths: tuple[Path, ...] = (), **extra: str) -> dict[str, str]:
        """Return the complete environment for a child process; `paths` come first on its PYTHONPATH."""
        env = self.rig.env(self.nixl, torch_stub=False, **extra)
        for name in [name for name in env if name.startswith("SGLANG_") and name not in extra]:
            del env[name]  # whatever the caller's shell happens to have
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # SGLang and torch take 20 s to compile
        _prepend(env, "PYTHONPATH", [*paths, *self.modules])
        return env

    def transfer(
        self, *options: str, name: str = "transfer", deadline: float = 90, paths: tuple[Path, ...] = (), **extra: str
    ) -> Outcome:
        """Run kv_transfer.py once; `name` names its log, `extra` goes into its environment."""
        command = [sys.executable, str(HERE / "kv_transfer.py"), "--deadline", str(deadline)]
        command += ["--start-method", "forkserver", *options]
        env = self.env(paths=paths, **extra)
        run = self.rig.run(f"sglang-{self.sglang}-{name}", command, env, deadline + 20, '{"ranks"')
        failed = {"ranks": {}, "data_ok": False, "error": f"no result, see {run.log}"}
        return Outcome(run.said or [failed], run.records, run.log)


def _base(to: Path, report: Callable[[str], None]) -> None:
    _install(to, report, "--requirement", str(REQUIREMENTS))
    _install(to, report, "--no-deps", TORCHVISION)


def _install(to: Path, report: Callable[[str], None], *what: str) -> None:
    report(f"installing {' '.join(word for word in what if not word.startswith('--'))} (minutes at first)")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    command += ["--root-user-action=ignore", "--only-binary=:all:", "--target", str(to), *what]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise RigError(
            f"pip could not install {' '.join(what)} for Python {python}. SGLang's releases here have wheels for 3.11 "
            f"to 3.13.\n{done.stderr.strip()}"
        )


def sources(sglang: str, root: Path, report: Callable[[str], None] = lambda line: None) -> dict[str, str]:
    """The source text of SGLang's transfer backends, by module; `sglang` is a version, or "" for the newest."""

    def make(to: Path) -> None:
        with tempfile.TemporaryDirectory(dir=root) as temporary:
            _unpack(f"sglang=={sglang}" if sglang else "sglang", Path(temporary), report)
            for path in Path(temporary).glob("sglang/srt/disaggregation/*/conn.py"):
                kept = to / path.relative_to(temporary)
                kept.parent.mkdir(parents=True)
                kept.write_bytes(path.read_bytes())

    if sglang:
        with _one_at_a_time(root):
            folder = _cached(root / f"sglang-sources-{sglang}", make)
        return _read(folder)
    with tempfile.TemporaryDirectory(dir=root) as fresh:
        make(Path(fresh))
        return _read(Path(fresh))


def _read(folder: Path) -> dict[str, str]:
    return {
        ".".join(path.relative_to(folder).with_suffix("").parts): path.read_text() for path in folder.rglob("conn.py")
    }


if __name__ == "__main__":
    try:
        for version in sys.argv[1:] or PAIRS:
            made = Environment.prepare(version, report=print)
            print(f"SGLang {version} with NIXL {made.nixl}: ready in {made.rig.root}")
    except (RigError, KeyError) as error:
        sys.exit(f"environment: {error}")
