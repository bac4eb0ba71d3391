# SPDX-License-Identifier: Apache-2.0
"""All that a project writes to have ctxfix bind its threads; its package's ``__init__`` would do."""

import ctxfix
from ctxfix.patches.host import Device, Hook

ctxfix.patch_host(
    "acme",
    Hook("acme_engine", "Engine.send_loop", lambda engine: engine.pool, thread=True),
    Hook("acme_engine", "Engine.flush", lambda engine, job: Device(engine.gpu)),
)
