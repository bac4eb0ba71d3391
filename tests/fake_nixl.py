# SPDX-License-Identifier: Apache-2.0
"""A stand-in for NIXL's Python module, with NIXL's own signatures, that notes the context of every call."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from fake_cuda import FakeCuda

from ctxfix import counters

MIB = 1 << 20
VRAM, DRAM = "VRAM_SEG", "DRAM_SEG"


class DList:
    def __init__(self, mem_type: str, rows: Any) -> None:
        self._type, self._rows = mem_type, [tuple(int(v) for v in tuple(row)[:3]) for row in rows]

    def getType(self) -> str:
        return self._type

    def descCount(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> tuple[int, int, int]:
        return self._rows[i] if i < len(self._rows) else (0, 0, 0)


def make_module(seen: list[tuple[str, int]], cuda: FakeCuda) -> types.ModuleType:
    """A module shaped like nixl_cu12._api; ``seen`` gets (method, current context) of each call that reaches it."""

    def note(name: str) -> None:
        seen.append((name, cuda.current()))
        action = module.actions.get(name)
        if action is not None:
            action()

    class nixl_xfer_handle:
        __slots__ = ("_agent", "_handle", "_released")
        next_free = [1]

        def __init__(self, agent: Any, value: int) -> None:
            self._handle, self._agent, self._released = value, agent, False

        def release(self) -> None:
            if not self._released:
                note("release")
                self._released = True

        def __del__(self) -> None:
            pass

    class nixl_prepped_dlist_handle(nixl_xfer_handle):
        __slots__ = ()
        refuse = False

        def release(self) -> None:
            if self.refuse:
                raise RuntimeError("still in use")
            self._released = True

        def __del__(self) -> None:
            pass

    class nixl_agent:
        def __init__(self, agent_name: str, nixl_conf: Any = None, instantiate_all: bool = False) -> None:
            note("__init__")

        def create_backend(self, backend: str, initParams: dict[str, str] = {}) -> None:  # noqa: B006
            note("create_backend")

        def register_memory(self, reg_list: Any, mem_type: str | None = None, backends: list[str] = []) -> DList:  # noqa: B006
            note("register_memory")
            if isinstance(reg_list, DList):
                return reg_list
            return DList(VRAM if mem_type in ("VRAM", "cuda") else DRAM, reg_list)

        def deregister_memory(self, dereg_list: DList, backends: list[str] = []) -> None:  # noqa: B006
            note("deregister_memory")

        def prep_xfer_dlist(self, agent_name: str, xfer_list: Any, mem_type: str | None = None) -> Any:
            note("prep_xfer_dlist")
            return nixl_prepped_dlist_handle(self, module.new_handle())

        def make_prepped_xfer(
            self, operation: str, local_xfer_side: Any, local_indices: Any, remote_xfer_side: Any, remote_indices: Any
        ) -> Any:
            note("make_prepped_xfer")
            return nixl_xfer_handle(self, module.new_handle())

        def initialize_xfer(
            self, operation: str, local_descs: DList, remote_descs: Any, remote_agent: str, notif_msg: bytes = b""
        ) -> Any:
            note("initialize_xfer")
            return nixl_xfer_handle(self, module.new_handle())

        def estimate_xfer_cost(self, req_handle: Any) -> None:
            note("estimate_xfer_cost")

        def transfer(self, handle: Any, notif_msg: bytes = b"") -> str:
            note("transfer")
            return "PROC"

        def check_xfer_state(self, handle: Any) -> str:
            note("check_xfer_state")
            return "DONE"

        def get_new_notifs(self, backends: list[str] = []) -> dict:  # noqa: B006
            note("get_new_notifs")
            return {}

        def update_notifs(self, backends: list[str] = []) -> dict:  # noqa: B006
            note("update_notifs")
            return {}

        def check_remote_xfer_done(self, remote_agent_name: str, lookup_tag: bytes) -> bool:
            note("check_remote_xfer_done")
            return True

        def prep_mem_view(self, dlist: Any, *, backends: list[str] | None = None) -> int:
            note("prep_mem_view")
            return 1

        def release_mem_view(self, mvh: int) -> None:
            note("release_mem_view")

        def make_connection(self, remote_agent: str, backends: list[str] = []) -> None:  # noqa: B006
            note("make_connection")

        def add_remote_agent(self, metadata: bytes) -> str:
            note("add_remote_agent")
            return "peer"

        def remove_remote_agent(self, agent: str) -> None:
            note("remove_remote_agent")

        def send_notif(self, remote_agent_name: str, notif_msg: bytes, backend: str | None = None) -> None:
            note("send_notif")

    module = types.ModuleType("nixl_cu12._api")
    module.nixl_agent = nixl_agent
    module.nixl_xfer_handle = nixl_xfer_handle
    module.nixl_prepped_dlist_handle = nixl_prepped_dlist_handle
    module.nixlBind = types.SimpleNamespace(VRAM_SEG=VRAM)
    module.actions = {}
    module.handles = iter(range(1, 10**9))
    module.new_handle = lambda: next(module.handles)
    return module


class Nixl:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.seen: list[tuple[str, int]] = []
        self.module = make_module(self.seen, cuda)
        self.counted = counters.snapshot()

    def agent(self) -> Any:
        return self.module.nixl_agent("agent")

    def on(self, method: str, action: Callable[[], None]) -> None:
        """Do ``action`` inside each call of ``method``."""
        self.module.actions[method] = action

    def context_of(self, method: str) -> int:
        """The context that was current in the latest call of ``method``."""
        return next(context for name, context in reversed(self.seen) if name == method)

    def counted_since(self, name: str) -> int:
        return counters.snapshot()[name] - self.counted[name]


def one(address: int, device: int = 1) -> DList:
    return DList(VRAM, [(address, 4096, device)])


#: A call of each hooked method: (agent, address of registered memory of GPU 1, handle of a transfer of it).
METHODS: dict[str, Callable[[Any, int, Any], object]] = {
    "register_memory": lambda a, p, h: a.register_memory([(p + MIB // 2, 4096, 1, "")], "VRAM"),
    "deregister_memory": lambda a, p, h: a.deregister_memory(one(p)),
    "prep_xfer_dlist": lambda a, p, h: a.prep_xfer_dlist("NIXL_INIT_AGENT", one(p)),
    "make_prepped_xfer": lambda a, p, h: a.make_prepped_xfer("READ", a.prep_xfer_dlist("", one(p)), [0], None, [0]),
    "initialize_xfer": lambda a, p, h: a.initialize_xfer("READ", one(p), None, "peer"),
    "estimate_xfer_cost": lambda a, p, h: a.estimate_xfer_cost(h),
    "transfer": lambda a, p, h: a.transfer(h),
    "check_xfer_state": lambda a, p, h: a.check_xfer_state(h),
    "release": lambda a, p, h: h.release(),
    "get_new_notifs": lambda a, p, h: a.get_new_notifs(),
    "update_notifs": lambda a, p, h: a.update_notifs(),
    "check_remote_xfer_done": lambda a, p, h: a.check_remote_xfer_done("peer", b"tag"),
    "prep_mem_view": lambda a, p, h: a.prep_mem_view(one(p)),
    "release_mem_view": lambda a, p, h: a.release_mem_view(1),
    "make_connection": lambda a, p, h: a.make_connection("peer"),
    "add_remote_agent": lambda a, p, h: a.add_remote_agent(b"metadata"),
    "remove_remote_agent": lambda a, p, h: a.remove_remote_agent("peer"),
    "send_notif": lambda a, p, h: a.send_notif("peer", b"message"),
}


class Boom(Exception):
    pass


def boom() -> None:
    raise Boom
