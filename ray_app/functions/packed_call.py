"""A call of a function as bytes, which processes that lack its module can read; and outcomes that the caller can read."""

import inspect
import io
import os
import pickle
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from training.errors import ConfigError

_OURS = {"ray_app", "training", "serving", "configs"}
"""Installed wherever Polythink is."""
_WORKERS_OWN = {
    *("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("CUDA_VISIBLE_DEVICES", "MPLBACKEND"),
}
"""Variables that are set for each worker, as all of Ray's are; and Jupyter's for its own process, which draws into the notebook."""
_READ_EARLY = ("CUBLAS_", "CUDA_", "GLOO_", "MKL_", "NCCL_", "OMP_", "OPENBLAS_", "PYTORCH_", "TORCH")
"""How the variables begin that a process, or its CUDA, reads once: before it has the call."""


def pack_call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """The call as bytes: what was defined in a notebook, or in modules beside the function's, travels by value.

    Raises:
        ConfigError: the function refers to something, or is given something, that cannot be pickled.
    """
    from ray import cloudpickle

    modules, variables = _modules_beside(function), _set_here()
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        return pickle.dumps((variables, cloudpickle.dumps((function, tuple(args), dict(kwargs)))))
    except Exception as fault:  # any: pickling runs the objects' own code
        name = getattr(function, "__qualname__", "the function")
        culprits = [repr(key) for key, value in _named(function, args, kwargs).items() if not _travels(value)]
        raise ConfigError(
            f"{name} cannot be sent to the workers, as {' and '.join(culprits) or 'something that it uses'} "
            f"cannot be pickled: {fault}",
            hint="Make it inside of the function.",
        ) from fault
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def unpack_call(call: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The function and its arguments, in an environment with the variables that the caller's program set."""
    variables, packed = pickle.loads(call)
    os.environ.update(variables)  # first: modules that the function brings along read them when they are imported
    function, args, kwargs = pickle.loads(packed)
    return function, args, kwargs


def early_variables(call: bytes) -> dict[str, str]:
    """Those of the caller's variables that a worker's process must start with."""
    variables, _ = pickle.loads(call)
    return {name: value for name, value in variables.items() if name.startswith(_READ_EARLY)}


def _set_here() -> dict[str, str]:
    """Environment variables that this program set since it started, as notebooks do in a cell; {} where that cannot be told."""
    try:
        lines = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:  # not Linux
        return {}
    before = dict(os.fsdecode(line).split("=", 1) for line in lines if b"=" in line)
    if "PATH" not in before:  # a process that changed its title, as Ray's workers do, wrote it there
        return {}
    return {
        name: value
        for name, value in os.environ.items()
        if before.get(name) != value and name not in _WORKERS_OWN and not name.startswith("RAY_")
    }


def _named(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What a call refers to by name."""
    found: dict[str, Any] = {}
    try:
        variables = inspect.getclosurevars(function)
        found |= {**variables.globals, **variables.nonlocals}
    except (TypeError, ValueError):  # not a function, or a variable that has no value yet
        pass
    try:
        return {**found, **inspect.signature(function).bind_partial(*args, **kwargs).arguments}
    except (TypeError, ValueError):  # arguments that do not fit: the worker will say so
        return found | dict(kwargs)


def _travels(value: Any) -> bool:
    from ray import cloudpickle

    try:
        cloudpickle.dumps(value)
    except Exception:  # any, as above
        return False
    return True


def _modules_beside(function: Callable[..., Any]) -> list[ModuleType]:
    """Loaded modules from the folder of the function's file (or the working directory, for a notebook's), installed ones left out."""
    try:
        root = Path(inspect.getfile(inspect.unwrap(function))).resolve().parent
    except (TypeError, OSError):
        root = Path.cwd()
    if not root.is_dir():  # a notebook's cells have made-up file names
        root = Path.cwd()
    standard = Path(sysconfig.get_path("stdlib")).resolve()
    found = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name == "__main__" or name.partition(".")[0] in _OURS or not isinstance(file, str):
            continue
        path = Path(file).resolve()
        if path.is_relative_to(root) and "site-packages" not in path.parts and not path.is_relative_to(standard):
            found.append(module)
    return found


def pack_outcome(outcome: Any) -> bytes:
    """`outcome` as bytes for a machine that may have no GPU: CUDA tensors travel as CPU's."""
    from ray import cloudpickle
    from torch import Tensor
    from torch.nn import Parameter

    class OnCpu(cloudpickle.Pickler):  # type: ignore[misc, name-defined]
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, Tensor) and value.is_cuda:
                moved = value.detach().cpu()
                value = Parameter(moved, value.requires_grad) if isinstance(value, Parameter) else moved
                return value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            return super().reducer_override(value)

    file = io.BytesIO()
    OnCpu(file).dump(outcome)
    return file.getvalue()


def portable(error: BaseException) -> Any:
    """`error`, or what pickles in its place and is read as the error: one whose `__init__` takes other arguments than its message."""
    from ray import cloudpickle

    try:
        pickle.loads(cloudpickle.dumps(error))
    except Exception:  # whatever that `__init__` makes of the message
        return _Portable(error)
    return error


class _Portable:
    def __init__(self, error: BaseException):
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self._error), self._error.args, self._error.__dict__)


def _rebuild(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error
