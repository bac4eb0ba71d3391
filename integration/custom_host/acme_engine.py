# SPDX-License-Identifier: Apache-2.0
"""A transfer engine that knows nothing of ctxfix, and whose threads choose no device. In place of yours."""

from __future__ import annotations

import queue
import threading
from typing import Any


class Engine:
    """Sends pieces of a pool of GPU memory; ``send`` is what would use CUDA."""

    def __init__(self, pool: Any, gpu: int, send: Any) -> None:
        self.pool, self.gpu, self._send = pool, gpu, send
        self.jobs: queue.Queue[Any] = queue.Queue()
        self.thread = threading.Thread(target=self.send_loop, name="acme-sender", daemon=True)

    def send_loop(self) -> None:
        """The whole life of the sender's thread."""
        while (job := self.jobs.get()) is not None:
            self._send(job)

    def flush(self, job: Any) -> None:
        """Called on whatever thread the application has."""
        self._send(job)
