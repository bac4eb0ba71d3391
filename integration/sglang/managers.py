# SPDX-License-Identifier: Apache-2.0
"""SGLang's own KV managers, senders, receivers and bootstrap server, without a model around them.

What differs between the releases is told here, and nowhere else. All that moves data is SGLang's code: the managers
with their threads, the bootstrap server that prefill ranks register with and decode ranks ask, the rooms, the ZMQ
messages. Told by hand is only what a scheduler would have learnt from a model and its process groups: the buffers, the
rank, the width of tensor parallelism.
"""
# ruff: noqa: E402 - what SGLang reads when it is imported is set before

from __future__ import annotations

import os
import time
import warnings
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

HOST = "127.0.0.1"
os.environ.setdefault("HOST_IP", HOST)  # else SGLang looks for the machine's address on the network
os.environ.setdefault("SGLANG_DISAGGREGATION_NIXL_BACKEND", "LIBFABRIC")

import torch

warnings.filterwarnings("ignore", module="sglang")  # of kernels that this machine has no device for

try:
    import torchvision  # noqa: F401
except (ImportError, RuntimeError):
    # torchvision's operators are not built for this torch; SGLang imports torchvision, and uses none of them here.
    _operators = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

# SGLang's kernels are no part of this: it is imported as on a machine without a GPU, where it does without them.
_cuda, _is_available = torch.version.cuda, torch.cuda.is_available
torch.version.cuda, torch.cuda.is_available = None, lambda: False
try:
    import sglang
    import sglang.srt.disaggregation.common.conn as common
    import sglang.srt.disaggregation.nixl.conn as nixl
    from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
    from sglang.srt.disaggregation.utils import DisaggregationMode
finally:
    torch.version.cuda, torch.cuda.is_available = _cuda, _is_available

#: From some release on SGLang publishes its configuration and its ranks in one place.
PUBLISHES = hasattr(common, "get_parallel")


@dataclass(frozen=True)
class Place:
    """Which rank of how many this process is, and where its bootstrap server listens."""

    mode: str  # "prefill" or "decode"
    rank: int
    tp: int
    bootstrap_port: int

    @property
    def bootstrap(self) -> str:
        return f"{HOST}:{self.bootstrap_port}"


@dataclass(frozen=True)
class Buffers:
    """A rank's KV cache: one buffer a layer, and the host memory in which metadata travel along."""

    addresses: list[int]
    slots: int
    slot_bytes: int
    aux_address: int
    aux_slots: int
    aux_bytes: int


def kv_args(place: Place, gpu: int, buffers: Buffers) -> KVArgs:
    """What SGLang's scheduler tells a KV manager of an MLA model with page size 1."""
    layers = len(buffers.addresses)
    args = KVArgs()
    vars(args).update(
        engine_rank=place.rank,
        kv_data_ptrs=list(buffers.addresses),
        kv_data_lens=[buffers.slots * buffers.slot_bytes] * layers,
        kv_item_lens=[buffers.slot_bytes] * layers,
        kv_layer_ids=list(range(layers)),
        kv_cache_dtype_str="bf16",
        aux_data_ptrs=[buffers.aux_address],
        aux_data_lens=[buffers.aux_slots * buffers.aux_bytes],
        aux_item_lens=[buffers.aux_bytes],
        state_types=[],
        state_data_ptrs=[],
        state_data_lens=[],
        state_item_lens=[],
        state_layer_ids=[],
        state_dim_per_tensor=[],
        state_slice_outer_counts=[],
        state_conv_shard_groups=[],
        is_hybrid_mla_backend=False,
        swa_kv_cache_layout=None,
        ib_device=None,
        ib_traffic_class=None,
        gpu_id=gpu,
        kv_head_num=1,
        total_kv_head_num=1,
        page_size=1,
        system_dp_rank=0,
        rust_http_port=None,
        pp_rank=0,
        prefill_start_layer=0,
        prefill_end_layer=layers,
        mla_compression_ratios=None,
    )
    return args


def bootstrap_server(port: int) -> Any:
    """The server of prefill's first node. It serves in a thread of its own."""
    return nixl.NixlKVBootstrapServer(HOST, port)


def manager(place: Place, gpu: int, buffers: Buffers) -> Any:
    """The KV manager of a rank; a prefill one registers with the bootstrap server."""
    args = kv_args(place, gpu, buffers)
    configuration = _publish(place, gpu) if PUBLISHES else _tell_ranks(place)
    mode = DisaggregationMode.PREFILL if place.mode == "prefill" else DisaggregationMode.DECODE
    return nixl.NixlKVManager(args, mode, configuration, True)


def _publish(place: Place, gpu: int) -> Any:
    """0.5.23: as the scheduler's process does it."""
    from sglang.srt import runtime_context
    from sglang.srt.server_args import ServerArgs

    server_args = ServerArgs(
        model_path="dummy",
        host=HOST,
        tp_size=place.tp,
        device="cuda",
        disaggregation_mode=place.mode,
        disaggregation_bootstrap_port=place.bootstrap_port,
        disaggregation_transfer_backend="nixl",
    )
    server_args.resolve_once()
    ranks = runtime_context.SpawnRanks(world_rank=place.rank, gpu_id=gpu)
    runtime_context.publish(server_args, role="scheduler", ranks=ranks)
    runtime_context.get_parallel().override_permanently(pp_group=None)  # one stage: nobody to talk to
    return server_args


def _tell_ranks(place: Place) -> Any:
    """0.5.12: the ranks come from process groups, which only a model's workers make."""
    for name, value in {
        "get_attention_tp_size": place.tp,
        "get_attention_tp_rank": place.rank,
        "get_attention_cp_size": 1,
        "get_attention_cp_rank": 0,
        "get_attention_dp_size": 1,
        "get_attention_dp_rank": 0,
        "get_pp_group": None,
    }.items():
        assert hasattr(common, name), f"SGLang {sglang.__version__} takes its ranks from elsewhere: no {name}"
        setattr(common, name, lambda value=value: value)
    return SimpleNamespace(
        host=HOST,
        disaggregation_bootstrap_port=place.bootstrap_port,
        dist_init_addr=None,
        enable_dp_attention=False,
        dp_size=1,
        pp_size=1,
        nnodes=1,
        kv_cache_dtype="bf16",
        load_balance_method="round_robin",
        enable_hisparse=False,
        chunked_prefill_size=8192,
    )


class Failed(RuntimeError):
    """SGLang reports that a transfer failed, or does not report anything in time."""


class Sending:
    """One request on the prefill side: waits for its decode rank, then sends all of its KV cache."""

    def __init__(self, manager: Any, place: Place, room: int, slots: Any, aux_slot: int = 0) -> None:
        more = () if PUBLISHES else ([place.rank], 0)
        self._sender = nixl.NixlKVSender(manager, place.bootstrap, room, *more)
        self._sender.init(len(slots), aux_slot)
        self._manager, self._room, self._slots = manager, room, slots

    def poll(self) -> int:
        return _checked(self._sender, self._manager, self._room)

    @property
    def bootstrapped(self) -> bool:
        return self.poll() >= KVPoll.WaitingForInput

    def send(self) -> None:
        self._sender.send(self._slots)

    @property
    def done(self) -> bool:
        return self.poll() == KVPoll.Success


class Receiving:
    """One request on the decode side: tells its prefill rank where the KV cache is to go."""

    def __init__(self, manager: Any, place: Place, room: int, slots: Any, aux_slot: int = 0) -> None:
        wait_for(lambda: manager.try_ensure_parallel_info(place.bootstrap), "the bootstrap server", poll=0.05)
        self._receiver = nixl.NixlKVReceiver(manager, place.bootstrap, room)
        self._receiver.init(0)
        self._manager, self._room = manager, room
        self.poll()
        self._receiver.send_metadata(slots, aux_slot)

    def poll(self) -> int:
        return _checked(self._receiver, self._manager, self._room)

    @property
    def done(self) -> bool:
        return self.poll() == KVPoll.Success


def _checked(end: Any, manager: Any, room: int) -> int:
    status: int = end.poll()
    if status == KVPoll.Failed:
        raise Failed(f"room {room}: {manager.failure_records.get(room) or 'SGLang gives no reason'}")
    return status


def wait_for(condition: Any, what: str, seconds: float = 60, poll: float = 0.0005) -> None:
    """Ask until ``condition()`` holds, as a scheduler's loop does."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise Failed(f"waited {seconds:.0f} s in vain for {what}")
        time.sleep(poll)
