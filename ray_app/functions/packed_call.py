"""A call of a function as bytes, which processes that lack its module can read; and errors that can be pickled."""

import inspect
import pickle
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_OURS = {"ray_app", "training", "serving", "configs"}
"""Installed wherever Polythink is."""


def pack_call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """The call as bytes: what was defined in a notebook, or in modules beside the function's, travels by value."""
    from ray import cloudpickle

    modules = _modules_beside(function)
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps((function, tuple(args), dict(kwargs)))
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


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
