# SPDX-License-Identifier: Apache-2.0
"""vLLM: the threads of its NIXL connector and of its sharded weight transfer work in the context of their memory.

Read in the wheels of 0.9.2 to 0.33.0 (docs/vllm.md has the versions). The hooks on nixl_agent bind each post, poll and
handshake that vLLM makes through NIXL, on whatever thread. This patch adds what vLLM alone knows, the memory:

- the thread ``nixl-push-writer`` (0.26 on), which writes all KV blocks of the push connector and never sets a device;
- the handshake executor before 0.18, which did not set one (later ones do, and keep their choice);
- sharded_rdt (0.30 on): a worker's READ is posted by Ray inside ``ray.get`` on the calling thread, which has a device
  only if vLLM's caller chose one; a trainer's server runs each method on a thread that Ray made.

``device_id`` is asked only where no address tells: it is 0 until the KV caches are registered.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ctxfix.patches.host import Device, Hook, Host

_CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1"
PUSH = f"{_CONNECTORS}.nixl.push_worker"
OLD = f"{_CONNECTORS}.nixl_connector"
RDT_WORKER = "vllm.distributed.weight_transfer.sharded_rdt_engine"
RDT_TRAINER = "vllm.distributed.weight_transfer.sharded_rdt_trainer"


def _kv_caches(connector: Any, *_: Any, **__: Any) -> Iterator[Any]:
    """The KV caches that a connector's worker registered: tensors, or lists of them; by address before 0.11."""
    yield from getattr(connector, "device_kv_caches", {}).values()
    addresses = getattr(connector, "kv_caches_base_addr", {}).get(getattr(connector, "engine_id", None), ())
    if isinstance(addresses, dict):  # by rank
        addresses = [address for of_rank in addresses.values() for address in of_rank]
    yield list(addresses)
    if hasattr(connector, "device_id") and not getattr(connector, "use_host_buffer", False):
        yield Device(connector.device_id)


def _pulled(_: Any, pending: Any) -> Any:
    """Where a pull lands: the view of the receive buffer that Ray was given as target."""
    return pending.blob


def _own_gpu(server: Any, *_: Any, **__: Any) -> Any:
    """The GPU that a trainer's server was made on."""
    yield getattr(server, "_nixl_warmup_buf", None)
    yield Device(server._device_index)


_host = Host(
    "vLLM",
    [
        Hook(PUSH, "NixlPushConnectorWorker._push_writer_loop", _kv_caches, thread=True),
        Hook(OLD, "NixlConnectorWorker._nixl_handshake", _kv_caches, optional=True),
        Hook(RDT_WORKER, "ShardedRDTWeightTransferEngine._complete_pull", _pulled),
        Hook(RDT_TRAINER, "_RDTProducerServer.warmup_nixl", _own_gpu),
        Hook(RDT_TRAINER, "_RDTProducerServer.reserve_serve_buffer", _own_gpu),
        Hook(RDT_TRAINER, "_RDTProducerServer.rdt_produce_weights_batched", _own_gpu),
    ],
)
apply, remove, status = _host.apply, _host.remove, _host.status
