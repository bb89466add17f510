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
_WORKERS_OWN = ("RAY_", "CUDA_VISIBLE_DEVICES", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "NODE_RANK")
"""How the variables begin that are set for each worker."""
_READ_EARLY = ("CUDA_", "NCCL_", "OMP_", "PYTORCH_", "TORCH")
"""How the variables begin that a process, or its CUDA, reads once: before it has the call."""


def pack_call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """The call as bytes: what was defined in a notebook, or in modules beside the function's, travels by value.

    Raises:
        ConfigError: the function refers to something, or is given something, that cannot be pickled.
    """
    from ray import cloudpickle

    modules = _modules_beside(function)
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        return pickle.dumps((_set_here(), cloudpickle.dumps((function, tuple(args), dict(kwargs)))))
    except Exception as fault:  # any: pickling runs the objects' own code
        name = getattr(function, "__qualname__", "the function")
        culprits = [repr(key) for key, value in _named(function, kwargs).items() if not _travels(value)]
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
    """Environment variables that this program set since it started, as notebooks do in a cell."""
    lines = Path("/proc/self/environ").read_bytes().split(b"\0")
    before = dict(os.fsdecode(line).split("=", 1) for line in lines if b"=" in line)
    return {
        name: value
        for name, value in os.environ.items()
        if before.get(name) != value and not name.startswith(_WORKERS_OWN)
    }


def _named(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What a call refers to by name."""
    if not inspect.isfunction(function):
        return dict(kwargs)
    variables = inspect.getclosurevars(function)
    return {**variables.globals, **variables.nonlocals, **kwargs}


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
