"""Metrics on their way to a store: a queue and a thread, so that a slow or absent store never holds up a training step."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


class Outbox:
    """Sends lists of metrics one after another; the first failure is logged, what failed is not sent again."""

    def __init__(self, send: Callable[[list[Any]], object], capacity: int = 1000):
        self._send = send
        self._queue: queue.Queue[list[Any]] = queue.Queue(capacity)
        self._lost = 0
        self._thread: threading.Thread | None = None

    def put(self, metrics: list[Any]) -> None:
        """Queues `metrics`; never waits."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="mlflow-metrics", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(metrics)
        except queue.Full:
            self._lose("the store is too slow")

    def flush(self, timeout_s: float) -> None:
        """Waits until the queue is empty, `timeout_s` at most."""
        deadline = time.monotonic() + timeout_s
        while self._queue.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.02)

    def _work(self) -> None:
        while True:
            metrics = self._queue.get()
            try:
                self._send(metrics)
            except Exception as error:  # whatever MLflow raises, the thread must go on
                self._lose(error)
            finally:
                self._queue.task_done()

    def _lose(self, reason: object) -> None:
        if not self._lost:
            logger.warning("Metrics do not reach MLflow (metrics.jsonl of the run directory has them): %s", reason)
        self._lost += 1
