# SPDX-License-Identifier: Apache-2.0
"""A trainer's server and a worker of vLLM's sharded_rdt, as Ray actors: their own classes, driven by hand."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ray"))

import actors  # the stand-in, and Ray's choice of libfabric
import ray
import torch
from ray._private.worker import global_worker
from vllm.distributed.weight_transfer import sharded_rdt_common as common
from vllm.distributed.weight_transfer.sharded_rdt_engine import ShardedRDTWeightTransferEngine
from vllm.distributed.weight_transfer.sharded_rdt_trainer import _RDTProducerServer

torch.accelerator.current_device_index = torch.cuda.current_device
SIZE = 1 << 16
CHAIN = (("narrow", (0, 0, SIZE // 2), ()),)  # a worker asks for the first half of a weight


class Server(_RDTProducerServer):
    """The server, with weights put in where a trainer would publish them by CUDA IPC."""

    def __init__(self, device: int, **options: Any) -> None:
        torch.cuda.set_device(device)
        torch.zeros(1, device="cuda")
        super().__init__(**options)

    def fill(self, name: str, value: int) -> None:
        weight = torch.empty(SIZE, dtype=torch.uint8, device=self._serve_device).fill_(value)
        with self._cache_cond:
            self._cache[name] = weight

    def report(self) -> dict[str, Any]:
        return {"warmup": self._nixl_warmup_buf.get_device(), "contexts": actors.contexts()}


class Worker:
    """The engine of an inference worker, whose pull runs on a thread that has chosen no device."""

    def __init__(self, device: int) -> None:
        torch.cuda.set_device(device)
        torch.zeros(1, device="cuda")
        engine = ShardedRDTWeightTransferEngine.__new__(ShardedRDTWeightTransferEngine)
        engine.device = torch.device("cuda", device)
        engine._slot_read_done, engine._dest_buffers = [], [{}, {}]
        engine._targets_cache, engine._buffer_presize = {}, 0
        self.engine = engine

    def pull(self, servers: list[Any], names: list[str]) -> dict[str, Any]:
        for server in servers:
            server._ray_enable_tensor_transport = True
        methods = [server.rdt_produce_weights_batched for server in servers]

        def dispatch(owner: int, keys: list, seq: int) -> Any:
            ref = methods[owner].remote(keys, 0, seq)
            global_worker.rdt_manager.wait_for_tensor_transport_metadata(ref.hex(), 60)
            return ref

        self.engine._router = SimpleNamespace(pull=dispatch)
        done: list[Any] = []

        def work() -> None:
            try:
                for slot, name in enumerate(names):
                    keys = [(name, CHAIN)]
                    layout = [(0, torch.uint8, SIZE // 2, (SIZE // 2,))]
                    chunk = SimpleNamespace(keys=keys, pack_bytes=SIZE // 2, pack_layout=layout, owner=slot, seq=0)
                    pulled = self.engine._complete_pull(self.engine._issue_pull(chunk, slot))
                    done.append([int(t.unique().item()) for t in pulled.values()])
            except Exception as error:  # told in the result
                done.append(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(120)
        return {"pulled": done, "contexts": actors.contexts(), "min_ray": common.RDT_MIN_RAY_VERSION}


def run() -> dict[str, Any]:
    """Two servers on GPUs 1 and 2, a worker on GPU 3, each with all GPUs visible."""
    options = {
        "num_cpus": 0.1,
        "enable_tensor_transport": True,
        "runtime_env": {"env_vars": {actors.NOSET: "1", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}},
    }
    servers = []
    for device in (1, 2):
        server = ray.remote(Server).options(**options, max_concurrency=6)
        servers.append(server.remote(device, num_rdt_buffers=2, buffer_presize_gb=0, gather_lookahead=1))
    ray.get([server.warmup_nixl.remote() for server in servers], timeout=120)
    ray.get([server.fill.remote(f"layer.{i}", 5 + i) for i, server in enumerate(servers)], timeout=60)
    worker = ray.remote(Worker).options(**options).remote(3)
    pulled = ray.get(worker.pull.remote(servers, ["layer.0", "layer.1"]), timeout=180)
    return {"worker": pulled, "servers": ray.get([server.report.remote() for server in servers], timeout=60)}
