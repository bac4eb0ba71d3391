# SPDX-License-Identifier: Apache-2.0
"""One process of the verification: a prefill or decode rank that uses NIXL as an application does.

Everything on the main thread but the transfers, which a bare ``threading.Thread`` posts, as in SGLang. It is told what
to do by lines of JSON on the file descriptor given first, and answers on the second; see ctxfix.verify.run.
"""

from __future__ import annotations

import base64
import ctypes
import importlib
import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from ctxfix import _startup, native
from ctxfix.errors import VerifyError
from ctxfix.evidence import cupti, identity, posts, recorder
from ctxfix.verify import shapes
from ctxfix.verify.gpu import Gpu, Pattern

_PEEK = 4096


class Worker:
    """A rank."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name = f"{config['role']}{config['rank']}"
        identity.declare(config["rank"], config["world"], config["role"], config["rank_source"])
        module = importlib.import_module(f"{config['module']}._api")
        if _startup.off_reason():
            self._watch_only(module)
        found = recorder.current()
        if found is None:
            raise VerifyError(f"nothing can be recorded into {config['record']}")
        self.recorder = found
        self.shapes = {shape.name: shape for shape in shapes.all_of(config["size"], config["tokens"])}
        self.gpu = Gpu(config["gpu"])
        self.gpu.make_current()
        self.witness = cupti.Witness()
        if config["cupti"]:
            self._call_witness()
        self.pattern, self.peer_pattern = Pattern(config["seed"]), Pattern(config["peer_seed"])
        self.size = max(shape.extent for shape in self.shapes.values())
        self.source, self.target = self.gpu.allocate(self.size), self.gpu.allocate(self.size)
        # The first copy CUPTI sees is ours: it makes CUPTI take its buffer on this thread, and proves that it reports.
        self.gpu.fill(self.source, _PEEK, self.pattern, 0)
        if config["limit"]:
            self.recorder.limit(self.gpu.ordinal, self.gpu.copy_limit(self.source, min(self.size, 512 << 20)))
        self.agent = module.nixl_agent(self.name, module.nixl_agent_config(backends=[config["backend"]]))
        rows = [(address, self.size, self.gpu.ordinal, "") for address in (self.source, self.target)]
        self.registered = self.agent.register_memory(rows, "VRAM")
        self.peer, self.remote, self.remote_gpu = "", 0, 0
        self.notified: dict[bytes, bool] = {}
        self._todo: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._transfer_worker, name="transfer_worker", daemon=True).start()

    def _watch_only(self, module: Any) -> None:
        """Record, and change nothing: the run without ctxfix."""
        found = recorder.start(self.config["record"])
        if found is None:
            return
        if native.available():
            native.observe(True)
        recorder.count_calls()
        posts.watch(module, found.observer)

    def _call_witness(self) -> None:
        """Now that CUDA is initialised and our context is there: CUPTI must not do that for us."""
        why = self.witness.begin()
        if not why:
            self.gpu.tell = self.witness.own
        self.recorder.witness({"reason": why or cupti.UNFINISHED})

    def _transfer_worker(self) -> None:
        while True:
            self._todo.get()()

    # ---- what it is told to do ---------------------------------------------------------------------------------------

    def hello(self) -> dict[str, Any]:
        """What the peer must know."""
        metadata = base64.b64encode(self.agent.get_agent_metadata()).decode()
        return {"metadata": metadata, "target": self.target, "gpu": self.gpu.ordinal}

    def meet(self, metadata: str, target: int, gpu: int) -> dict[str, Any]:
        """Get to know the peer."""
        name = self.agent.add_remote_agent(base64.b64decode(metadata))
        self.peer = name.decode() if isinstance(name, bytes) else name
        self.remote, self.remote_gpu = target, gpu
        return {}

    def fill(self, shape: str, transfer: int) -> dict[str, Any]:
        """Write what the next transfer will carry."""
        self.gpu.fill(self.source, self.shapes[shape].extent, self.pattern, transfer)
        return {}

    def send(self, shape: str, transfer: int, timeout: float) -> dict[str, Any]:
        """Post one transfer from the bare thread, and see it to its end."""
        done: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._todo.put(lambda: done.put(self._send(self.shapes[shape], transfer, timeout)))
        return done.get(timeout=timeout + 30)

    def _send(self, shape: shapes.Shape, transfer: int, timeout: float) -> dict[str, Any]:
        try:
            gpu, remote_gpu = self.gpu.ordinal, self.remote_gpu
            local = [(self.source + piece.source, piece.size, gpu) for piece in shape.pieces]
            remote = [(self.remote + piece.target, piece.size, remote_gpu) for piece in shape.pieces]
            local_descs = self.agent.get_xfer_descs(local, "VRAM")
            remote_descs = self.agent.get_xfer_descs(remote, "VRAM")
            handle = self.agent.initialize_xfer("WRITE", local_descs, remote_descs, self.peer, _note(transfer))
            started = time.perf_counter()
            state = self.agent.transfer(handle)
            while state == "PROC" and time.perf_counter() - started < timeout:
                state = self.agent.check_xfer_state(handle)
            took = time.perf_counter() - started
            if state != "DONE":  # an unfinished handle cannot be released
                return {"state": str(state), "seconds": took}
            self.agent.release_xfer_handle(handle)
            return {"state": "DONE", "seconds": took}
        except Exception as error:  # told in the answer
            return {"state": f"{type(error).__name__}: {error}", "seconds": 0.0}

    def receive(self, shape: str, transfer: int, timeout: float) -> dict[str, Any]:
        """Wait for the notification, read at once, then compare every byte."""
        form, pattern = self.shapes[shape], self.peer_pattern
        first, middle, last = form.pieces[0], form.pieces[len(form.pieces) // 2], form.pieces[-1]
        ends = [_tail(piece) for piece in (first, middle, last)]
        places = [(self.target + target, size) for target, _, size in ends]
        deadline = time.perf_counter() + timeout
        wanted = _note(transfer)
        while wanted not in self.notified:
            for notes in self.agent.get_new_notifs().values():
                self.notified.update(dict.fromkeys(notes, True))
            if time.perf_counter() > deadline:
                return {"state": "no notification came"}
        peeked = self.gpu.peek(places)
        del self.notified[wanted]
        late = sum(not _is(pattern, data, source, transfer) for data, (_, source, _) in zip(peeked, ends, strict=True))
        wrong = not all(
            self.gpu.same(self.target + piece.target, piece.size, pattern, transfer, piece.source)
            for piece in form.pieces
        )
        stale = bool(late) and not wrong
        self.recorder.check(
            sender=self.peer, receiver=self.name, transfers=1, bytes=form.bytes, wrong=int(wrong), stale=int(stale),
            shape=shape, stream=self.gpu.stream_problem or "own",
        )  # fmt: skip
        return {"state": "DONE", "wrong": wrong, "stale": stale}

    def finish(self) -> dict[str, Any]:
        """Leave as an application does."""
        if self.config["cupti"]:
            self.gpu.synchronize()
            self.recorder.witness(self.witness.report())
        self.recorder.snapshot(final=True)
        self.agent.deregister_memory(self.registered)
        return {}


def _note(transfer: int) -> bytes:
    return b"transfer-%d" % transfer


def _tail(piece: shapes.Piece) -> tuple[int, int, int]:
    """The last bytes of a piece: target, source, size."""
    size = min(_PEEK, piece.size)
    return piece.target + piece.size - size, piece.source + piece.size - size, size


def _is(pattern: Pattern, data: bytes, source: int, transfer: int) -> bool:
    return data == ctypes.string_at(pattern.at(source, transfer), len(data))


def main() -> int:
    """Serve until told to finish."""
    with os.fdopen(int(sys.argv[1]), "r") as orders, os.fdopen(int(sys.argv[2]), "w", buffering=1) as answers:

        def answer(value: dict[str, Any]) -> None:
            answers.write(json.dumps(value) + "\n")

        try:
            worker = Worker(json.loads(orders.readline()))
            answer(worker.hello())
            for line in orders:
                order = json.loads(line)
                answer(getattr(worker, order.pop("do"))(**order))
        except Exception as error:
            traceback.print_exc()
            answer({"error": f"{type(error).__name__}: {error}"})
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
