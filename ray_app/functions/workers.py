"""Runs a function in Ray Train workers, one per GPU, and brings back what each returned or raised."""

import contextlib
import functools
import os
import pickle
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

from ray_app.functions.hardware import Hardware
from ray_app.functions.packed_call import early_variables, pack_call, pack_outcome, portable, unpack_call
from ray_app.functions.placement import Placement, connect, place
from training.errors import TrainingError

ENVIRONMENT = {
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # its patched print confuses dill, which datasets fingerprints with
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # the function's relative paths are the caller's
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # a function has no checkpoint to save before its node goes
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
}


class Outcome(NamedTuple):
    """What the function came to in one worker."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""


class Mailbox:
    """An actor that keeps the outcomes, in the order of their arrival. Ray Train itself returns rank 0's value alone."""

    def __init__(self) -> None:
        self._outcomes: list[bytes] = []

    def put(self, outcome: bytes) -> None:
        self._outcomes.append(outcome)

    def outcomes(self) -> list[bytes]:
        return self._outcomes


def run(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], hardware: Hardware) -> list[Any]:
    """`function(*args, **kwargs)` in every worker; returns the values by rank. See `Distributed.distributed` for what it raises."""
    return run_packed(pack_call(function, args, kwargs), hardware)


def run_packed(call: bytes, hardware: Hardware) -> list[Any]:
    """As `run`, of a call that `pack_call` made."""
    with _environment(ENVIRONMENT):
        import ray

        connect(hardware)
        placement = place(hardware, [node["Resources"] for node in ray.nodes() if node["Alive"]])
        mailbox: Any = ray.remote(num_cpus=0)(Mailbox).remote()
        settings = {"call": call, "mailbox": mailbox, "directory": os.getcwd(), "gpu": placement.gpu}
        failure = _fit(placement, settings)
        outcomes: list[Outcome] = [pickle.loads(outcome) for outcome in ray.get(mailbox.outcomes.remote())]
        ray.kill(mailbox)
    return _values(outcomes, placement.workers, failure)


def _fit(placement: Placement, settings: dict[str, Any]) -> BaseException | None:
    """Runs the workers; returns Ray Train's error when one failed."""
    from ray._private.worker import get_dashboard_url
    from ray.train.torch import TorchConfig
    from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
    from ray.train.v2.api.config import RunConfig, ScalingConfig
    from ray.train.v2.api.exceptions import TrainingFailedError
    from ray.train.v2.torch.torch_trainer import TorchTrainer

    class Trainer(TorchTrainer):
        def _create_default_callbacks(self) -> list[Any]:
            """Without the one that asks the dashboard every second, and complains where there is none."""
            defaults = super()._create_default_callbacks()
            if get_dashboard_url():
                return defaults
            return [each for each in defaults if not isinstance(each, PlacementGroupCleanerCallback)]

    hidden = {} if placement.gpu else {"CUDA_VISIBLE_DEVICES": ""}  # Ray hides no GPU from who asks for none
    with tempfile.TemporaryDirectory(prefix="polythink-") as storage, _sigint_restored():
        trainer = Trainer(
            _work,
            train_loop_config=settings,
            scaling_config=ScalingConfig(
                num_workers=placement.workers,
                use_gpu=placement.gpu,
                accelerator_type=placement.accelerator_type,
                resources_per_worker={"CPU": 1, "GPU": 1} if placement.gpu else {"CPU": 1},
                placement_strategy="PACK",
            ),
            torch_config=TorchConfig(backend="nccl" if placement.gpu else "gloo"),
            run_config=RunConfig(
                storage_path=storage,
                worker_runtime_env={"env_vars": early_variables(settings["call"]) | hidden},
            ),
        )
        try:
            trainer.fit()
        except TrainingFailedError as error:
            return error
        except SystemExit:  # how Ray Train's own handler answers Ctrl-C; in a notebook it would end the kernel
            raise KeyboardInterrupt("the workers were stopped") from None
    return None


# In the worker


def _work(settings: dict[str, Any]) -> None:
    """A worker's part: the function, as under torchrun, in the caller's directory where it exists here."""
    import ray

    rank = int(os.environ["RANK"])
    if os.path.isdir(settings["directory"]):
        os.chdir(settings["directory"])
    if not settings["gpu"]:
        os.environ["ACCELERATE_USE_CPU"] = "true"  # else transformers' Trainer would train each rank for itself
    _init_process_group_once()
    with (
        contextlib.redirect_stdout(_RankPrefix(sys.stdout, rank)),  # type: ignore[type-var]
        contextlib.redirect_stderr(_RankPrefix(sys.stderr, rank)),  # type: ignore[type-var]
    ):
        outcome = _call(settings["call"], rank)
    ray.get(settings["mailbox"].put.remote(_packed(outcome)))
    if outcome.error is not None:
        raise RuntimeError(f"rank {rank}: {type(outcome.error).__name__}: {outcome.error}")


def _call(call: bytes, rank: int) -> Outcome:
    try:
        function, args, kwargs = unpack_call(call)
        return Outcome(rank, value=function(*args, **kwargs))
    except BaseException as error:  # whatever it is, the caller sees it
        below = error.__traceback__.tb_next if error.__traceback__ else None  # without this frame
        trace = "".join(traceback.format_exception(type(error), error, below))
        if not isinstance(error, SystemExit):
            return Outcome(rank, error=error, trace=trace)
        if error.code in (None, 0):
            return Outcome(rank)
        return Outcome(rank, error=_exited(rank, error.code), trace=trace)


def _exited(rank: int, code: object) -> TrainingError:
    """In place of a worker's SystemExit, which would end the caller's program, or a notebook's kernel, without a word."""
    return TrainingError(f"rank {rank} left by sys.exit({code!r})", hint="Raise an error that says why.")


def _packed(outcome: Outcome) -> bytes:
    """The outcome as bytes that the caller can read; what cannot travel becomes an error that says so."""
    from ray import cloudpickle

    try:
        packed = pack_outcome(outcome._replace(error=outcome.error and portable(outcome.error)))
        pickle.loads(packed)
    except Exception as fault:  # any: pickling runs the object's own code
        what = f"raised {outcome.error!r}" if outcome.error else f"returned a {type(outcome.value).__name__}"
        error = TrainingError(
            f"rank {outcome.rank} {what}, which cannot be pickled ({fault})", hint="Return plain values."
        )
        return cloudpickle.dumps(Outcome(outcome.rank, error=error, trace=outcome.trace))
    return packed


def _init_process_group_once() -> None:
    """Lets the function call `init_process_group`, as programs for torchrun do: the group is there already."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    init = distributed_c10d.init_process_group

    @functools.wraps(init)
    def once(*args: Any, **kwargs: Any) -> None:
        if not dist.is_initialized():
            init(*args, **kwargs)

    dist.init_process_group = distributed_c10d.init_process_group = once


class _RankPrefix:
    """A stream that opens each line with the rank."""

    def __init__(self, stream: TextIO, rank: int):
        self._stream = stream
        self._prefix = f"[rank {rank}] "
        self._inside = False  # a line that has begun
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        with self._lock:
            for piece in text.splitlines(keepends=True):
                bare = self._inside or piece == "\r"  # progress bars return before they write
                self._stream.write(piece if bare else self._prefix + piece)
                self._inside = not piece.endswith(("\n", "\r"))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


# In the caller


def _values(outcomes: Sequence[Outcome], workers: int, failure: BaseException | None) -> list[Any]:
    """The values by rank; raises what a rank raised, or what kept its value from travelling.

    Args:
        failure: Ray Train's own error.
    """
    if failure is not None or any(outcome.error is not None for outcome in outcomes):
        raise _worker_error(outcomes, workers, failure)
    return [outcome.value for outcome in sorted(outcomes, key=lambda outcome: outcome.rank)]


def _worker_error(outcomes: Sequence[Outcome], workers: int, failure: BaseException | None) -> BaseException:
    """The function's own error, of the rank that failed first; peers whose connection broke off came after it."""
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    for outcome in sorted(failed, key=_is_echo):
        assert outcome.error is not None
        outcome.error.add_note(f"\nRaised by rank {outcome.rank} of {workers}:\n{outcome.trace}")
        return outcome.error
    ranks = ", ".join(str(rank) for rank in sorted(getattr(failure, "worker_failures", None) or {}))
    return TrainingError(
        f"worker {ranks} died: {failure}" if ranks else str(failure),
        hint="A worker that dies without an error was mostly killed for its memory; Ray's log says so.",
    )


def _is_echo(outcome: Outcome) -> bool:
    """Whether an error is likely another rank's: a collective that lost its peer."""
    return any(word in str(outcome.error) for word in ("Connection", "gloo", "NCCL"))


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """`variables` in the environment, those set before left alone, and taken out at the end."""
    added = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _sigint_restored() -> Iterator[None]:
    """Puts back the handler of Ctrl-C, which Ray Train replaces for good."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
