# SPDX-License-Identifier: Apache-2.0
"""vLLM's own push connector and sharded_rdt classes, made without their constructors and driven; a line of JSON each.

    drive.py push | rdt

What a constructor would take from a whole engine (configuration, process groups, the model) is set by hand; the methods
under test, their threads and all that they call on NIXL and Ray are vLLM's.
"""

from __future__ import annotations

import collections
import json
import queue
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ray"))

import standin
import torch

standin.install()
GPU, SIZE, BLOCKS, DEADLINE = 1, 1 << 20, 4, 30.0


def agent(name: str) -> Any:
    from nixl._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(backends=["LIBFABRIC"]))


def kv_cache(fill: int) -> torch.Tensor:
    return torch.zeros(SIZE, dtype=torch.uint8, device=f"cuda:{GPU}").fill_(fill)


def connector(cls: Any, nixl: Any, cache: torch.Tensor) -> Any:
    """A worker of the connector with one layer of KV cache, connected to a peer of the same shape."""
    worker = cls.__new__(cls)
    worker.nixl_wrapper, worker.engine_id, worker.tp_rank, worker.world_size = nixl, "here", 0, 1
    worker.device_kv_caches, worker.device_id, worker.use_host_buffer = {"layer": cache}, GPU, False
    worker.use_mla = worker._has_mamba = worker._is_csa_linear = worker._mixed_mem_types = False
    worker._physical_blocks_per_logical_kv_block = 1
    worker._engine_last_active, worker._transfer_layer_group_ids = {}, {}
    worker._uses_region_group_mapping = False
    worker.region_group_ids = worker.region_num_blocks = []
    worker.dst_region_group_ids = worker.dst_region_num_blocks = collections.defaultdict(list)
    worker.dst_uses_region_group_mapping = collections.defaultdict(bool)
    worker.dst_num_blocks = {"here": BLOCKS, "there": BLOCKS}
    peer = SimpleNamespace(remote_tp_size=1, remote_block_size=16, remote_physical_blocks_per_logical=1)
    worker.transfer_topo = SimpleNamespace(
        get_engine_info=lambda engine: peer, tp_ratio=lambda size: 1, block_size_ratio=lambda size: 1
    )
    worker.tp_mappings = {"there": SimpleNamespace(all_source_ranks=(0,), source_ranks_per_group=[{0}])}
    worker._seen = []  # the devices that CUDA calls of the posting thread would use

    def descriptors(block_ids: Any, **_: Any) -> list[int]:
        worker._seen.append(torch.cuda.current_device())
        return [block for group in block_ids for block in group]

    worker._compute_desc_ids = descriptors
    worker._apply_prefix_caching = lambda decode_block_ids, prefill_block_ids, **_: (
        decode_block_ids,
        prefill_block_ids,
    )
    worker._logical_to_kernel_block_ids = lambda block_ids, ratio: block_ids
    worker._ensure_handshake = lambda *_: None  # there is a connection already
    worker._failures = []
    worker._log_failure = lambda **what: worker._failures.append(repr(what.get("error")))
    return worker


def prepared(nixl: Any, of: str, cache: torch.Tensor) -> Any:
    block = SIZE // BLOCKS
    return nixl.prep_xfer_dlist(of, [(cache.data_ptr() + i * block, block, GPU) for i in range(BLOCKS)], "VRAM")


def push() -> dict[str, Any]:
    """The real thread nixl-push-writer writes four blocks to a peer."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker as Worker

    torch.cuda.set_device(GPU)
    mine, theirs = kv_cache(7), kv_cache(0)
    here, there = agent("here"), agent("there")
    here.register_memory(mine), there.register_memory(theirs)
    here.add_remote_agent(there.get_agent_metadata())
    worker = connector(Worker, here, mine)
    worker.src_xfer_handles_by_block_size = {16: prepared(here, "NIXL_INIT_AGENT", mine)}
    worker.dst_xfer_side_handles = {"there": {0: prepared(here, "there", theirs)}}
    worker._push_finished_blocks, worker._pending_d_registrations, worker._send_failures = {}, {}, set()
    worker._sending_transfers, worker._sending_transfers_lock = collections.defaultdict(list), threading.Lock()
    for name in ("reg_send", "finished_blocks", "evict_finished", "deferred_push"):
        setattr(worker, f"_{name}_inbox", queue.Queue())
    worker._pending_completion_notifs = queue.Queue()
    worker._push_writer_wake, worker._push_writer_stop = threading.Event(), threading.Event()
    # As register_kv_caches starts it, but before anything else of ours has run on the thread.
    # Another engine of this process owns GPU 2 and starts the thread: nothing but the KV caches tells where it belongs.
    torch.cuda.set_device(GPU + 1)
    other = agent("other")
    other.register_memory(torch.zeros(SIZE, dtype=torch.uint8, device="cuda"))
    thread = threading.Thread(target=worker._push_writer_loop, daemon=True, name="nixl-push-writer")
    blocks = (list(range(BLOCKS)),)
    request = {"decode_engine_id": "there", "decode_host": "", "decode_port": 0, "decode_tp_size": 1}
    worker._deferred_push_inbox.put(("r1", blocks, {**request, "local_block_ids": blocks, "request_id": "r1"}))
    thread.start()
    _until(lambda: bool((theirs == 7).all()) or bool(worker._failures))
    worker._push_writer_stop.set()
    worker._push_writer_wake.set()
    thread.join(DEADLINE)
    return {"data_ok": bool((theirs == 7).all()), "failures": worker._failures, "devices": worker._seen}


def rdt() -> dict[str, Any]:
    """A trainer's real server and a worker's real pull, as two Ray actors, each with several GPUs visible."""
    import ray
    import ray.dag
    import ray.experimental.collective
    import rdt_actors

    with tempfile.TemporaryDirectory(prefix="rdt", dir="/tmp") as folder:
        ray.init(
            num_cpus=1,
            num_gpus=4,
            include_dashboard=False,
            object_store_memory=80 << 20,
            log_to_driver=False,
            _temp_dir=folder,
        )
        try:
            return rdt_actors.run()
        finally:
            ray.shutdown()


def _until(done: Any) -> None:
    end = time.monotonic() + DEADLINE
    while not done() and time.monotonic() < end:
        time.sleep(0.01)


if __name__ == "__main__":
    try:
        result = {"push": push, "rdt": rdt}[sys.argv[1]]()
    except Exception as error:  # told in the result
        result = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps({"driven": sys.argv[1], **result}), flush=True)
    # A process with NIXL agents and vLLM's threads has nothing to clean up that anybody waits for.
