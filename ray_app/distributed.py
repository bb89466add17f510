"""`@distributed`: runs a function of a notebook or script on a Ray cluster, a worker per GPU, as torchrun would.

    from ray_app import distributed

    @distributed(gpus=8, gpu_type="H100")
    def train(epochs): ...

    values = train.distributed(epochs=3)  # the return values, by rank

Loads without Ray and torch; `ray_app.functions.workers` and `ray_app.functions.remote_call` do the work.
"""

import functools
import os
from collections.abc import Callable
from typing import Any, overload

from ray_app.functions.hardware import OVERRIDE, Hardware


class Distributed:
    """A function with the hardware it wants. Called, it runs here; `distributed` runs it on workers."""

    def __init__(self, function: Callable[..., Any], hardware: Hardware):
        self.function = function
        self.hardware = hardware
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def distributed(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Runs the function in every worker and returns the return values by rank.

        The workers have RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and so on, the environment variables that this program set
        itself, and torch's process group. What they print is shown with their rank; tensors that they return lie in CPU memory.
        Ctrl-C stops them.

        Raises:
            ConfigError: the cluster has not the hardware; POLYTHINK_DISTRIBUTED overrides the decorator. Or the function uses
                what cannot be pickled.
            TrainingError: a worker died, or the remote job did.
            Exception: what the function raised in a worker, of its own type, with rank and traceback as a note.
        """
        hardware = self.hardware.overridden(os.environ.get(OVERRIDE, ""))
        if hardware.remote:
            from ray_app.functions import remote_call

            return remote_call.run(self.function, args, kwargs, hardware)
        from ray_app.functions import workers

        return workers.run(self.function, args, kwargs, hardware)


@overload
def distributed(function: Callable[..., Any]) -> Distributed: ...


@overload
def distributed(
    *, gpus: int = 1, gpu_type: str | None = None, workers: int = 0, remote: bool = False
) -> Callable[[Callable[..., Any]], Distributed]: ...


def distributed(
    function: Callable[..., Any] | None = None,
    *,
    gpus: int = 1,
    gpu_type: str | None = None,
    workers: int = 0,
    remote: bool = False,
) -> Distributed | Callable[[Callable[..., Any]], Distributed]:
    """Decorates a function so that `function.distributed(…)` runs it on the workers of a Ray cluster.

    Args:
        gpus: workers with a GPU each; 0 for CPU.
        gpu_type: Ray's accelerator type, in any case; None or `any` takes what there is.
        workers: workers on CPU, over gloo: with `gpus=0`, or where the cluster has no GPU.
        remote: submit a Ray Job to RAY_ADDRESS instead of using the cluster that this process is on.

    Raises:
        ConfigError: the numbers make no sense.
    """
    hardware = Hardware(gpus=gpus, gpu_type=gpu_type, workers=workers, remote=remote)
    if function is not None:
        return Distributed(function, hardware)
    return lambda decorated: Distributed(decorated, hardware)
