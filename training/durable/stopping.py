"""How a driver ends when it is told to: SIGTERM, by a cancel or a preemption, as an exception that nothing swallows."""

import contextlib
import signal
import time
from collections.abc import Iterator
from typing import Any


class Stopped(BaseException):
    """The driver was told to stop (SIGTERM), by a cancel or a preemption, or its Ray went away."""


@contextlib.contextmanager
def stop_on_sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    take_sigterm()
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


@contextlib.contextmanager
def stops_seen() -> Iterator[None]:
    """Raises a Stopped as itself: raised inside Ray's compiled code, it arrives as the cause of a SystemError."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, Stopped):
            cause = cause.__cause__ or cause.__context__
        if cause is not None:
            raise cause from None
        raise


@contextlib.contextmanager
def stops_with_ray() -> Iterator[None]:
    """A Ray that goes away under the driver (`polythink down`, a head that died) stops it as SIGTERM does: no failure of the run's own."""
    from ray.exceptions import LocalRayletDiedError, NodeDiedError, RayActorError

    try:
        yield
    except (RayActorError, LocalRayletDiedError, NodeDiedError) as error:
        raise Stopped(f"Ray went away: {str(error).splitlines()[0]}") from error


def take_sigterm() -> None:
    def stop(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: the MLflow run is being ended
        raise Stopped(f"told to stop at {time.strftime('%H:%M:%S')}")

    signal.signal(signal.SIGTERM, stop)
