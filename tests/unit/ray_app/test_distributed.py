"""What `@distributed` asks for, where it finds a place, what it sends, and which error it shows. No Ray is started."""

import io
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from ray_app import distributed
from ray_app.distributed import Distributed
from ray_app.functions.hardware import Hardware
from ray_app.functions.packed_call import early_variables, pack_call, unpack_call
from ray_app.functions.placement import Placement, place
from ray_app.functions.workers import Outcome, _call, _packed, _RankPrefix, _values, _worker_error
from training.errors import ConfigError, TrainingError

H100_NODE = {"CPU": 16.0, "GPU": 8.0, "accelerator_type:H100": 1.0}
CPU_NODE = {"CPU": 2.0}


def test_the_decorated_function_is_called_here_and_keeps_its_name() -> None:
    @distributed(gpus=8, gpu_type="H100", remote=True)
    def double(number: int) -> int:
        """Twice."""
        return 2 * number

    assert isinstance(double, Distributed)
    assert double(21) == 42
    assert (double.__name__, double.__doc__) == ("double", "Twice.")
    assert double.hardware == Hardware(gpus=8, gpu_type="H100", remote=True)


def test_the_decorator_works_without_parentheses() -> None:
    @distributed
    def one() -> int:
        return 1

    assert isinstance(one, Distributed)
    assert one.hardware == Hardware(gpus=1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Hardware(gpus=8, gpu_type="H100", remote=True)),
        ("workers=2", Hardware(gpus=0, gpu_type="H100", workers=2, remote=True)),
        ("gpus=1, gpu_type=any", Hardware(gpus=1, gpu_type="any", remote=True)),
        ("gpus=2,workers=4", Hardware(gpus=2, gpu_type="H100", workers=4, remote=True)),
        ("remote=false", Hardware(gpus=8, gpu_type="H100")),
    ],
)
def test_the_environment_overrides_the_decorator(text: str, expected: Hardware) -> None:
    assert Hardware(gpus=8, gpu_type="H100", remote=True).overridden(text) == expected


@pytest.mark.parametrize("text", ["gpu=1", "gpus=many", "workers=", "remote=maybe", "gpus=0", "gpus=-1"])
def test_a_faulty_override_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Hardware(gpus=8).overridden(text)


@pytest.mark.parametrize(
    ("hardware", "nodes", "expected"),
    [
        (Hardware(gpus=8, gpu_type="h100"), [H100_NODE], Placement(8, True, "H100")),
        (Hardware(gpus=16, gpu_type="H100"), [H100_NODE, H100_NODE, CPU_NODE], Placement(16, True, "H100")),
        (Hardware(gpus=3, gpu_type="Any"), [H100_NODE], Placement(3, True)),
        (Hardware(gpus=8, workers=2), [CPU_NODE], Placement(2, False)),
        (Hardware(gpus=8, workers=2), [H100_NODE], Placement(8, True)),
        (Hardware(gpus=0, workers=2), [H100_NODE], Placement(2, False)),
    ],
)
def test_placement(hardware: Hardware, nodes: list[dict[str, float]], expected: Placement) -> None:
    assert place(hardware, nodes) == expected


@pytest.mark.parametrize(
    ("hardware", "nodes", "message"),
    [
        (Hardware(gpus=8), [CPU_NODE], "asked for 8 GPUs, and the cluster has 0"),
        (Hardware(gpus=16, gpu_type="h100"), [H100_NODE], "asked for 16 H100 GPUs, and the cluster has 8"),
        (Hardware(gpus=1, gpu_type="a100"), [H100_NODE], "asked for 1 A100 GPUs, and the cluster has 0"),
        (Hardware(gpus=1, gpu_type="H10"), [H100_NODE], "no accelerator type"),
        (Hardware(gpus=0, workers=3), [CPU_NODE], "3 workers want a CPU each"),
    ],
)
def test_what_the_cluster_lacks_is_said(hardware: Hardware, nodes: list[dict[str, float]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        place(hardware, nodes)


@pytest.mark.parametrize(
    ("hardware", "nodes", "override"),
    [
        (Hardware(gpus=8), [CPU_NODE], "workers=2"),
        (Hardware(gpus=16), [H100_NODE], "gpus=8"),
        (Hardware(gpus=4, gpu_type="a100"), [H100_NODE], "gpus=4,gpu_type=any"),
        (Hardware(gpus=16, gpu_type="a100"), [H100_NODE, CPU_NODE], "gpus=8,gpu_type=any"),
    ],
)
def test_the_way_out_finds_a_place(hardware: Hardware, nodes: list[dict[str, float]], override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        place(hardware, nodes)
    assert f"POLYTHINK_DISTRIBUTED='{override}'" in caught.value.hint
    assert place(hardware.overridden(override), nodes).workers <= max(2, hardware.gpus)


def test_a_function_and_the_modules_beside_it_travel_by_value(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("FACTOR = 3\ndef times(number):\n    return FACTOR * number\n")
    (tmp_path / "far_away.py").write_text("import beside\ndef work(number):\n    return beside.times(number) + 1\n")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import far_away; from ray_app.functions.packed_call import pack_call\n"
        "sys.stdout.buffer.write(pack_call(far_away.work, (5,), {}))"
    )
    packed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, timeout=60, check=True)
    function, args, kwargs = unpack_call(packed.stdout)  # this process has neither module
    assert "far_away" not in sys.modules
    assert function(*args, **kwargs) == 16


def test_a_closure_travels_by_value() -> None:
    offset = 7
    function, args, kwargs = unpack_call(
        pack_call(lambda number, *, times: number * times + offset, (5,), {"times": 2})
    )
    assert function(*args, **kwargs) == 17


def test_what_this_program_set_in_its_environment_travels_but_for_what_is_each_workers_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SET_IN_A_CELL", "yes")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("LOCAL_DATA_DIR", "/rows")
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES", "RAY_ADDRESS"):
        monkeypatch.setenv(name, "the caller's")
    call = pack_call(print, (), {})
    early = early_variables(call)
    assert (early["NCCL_DEBUG"], early.get("SET_IN_A_CELL")) == ("INFO", None)
    variables, _ = pickle.loads(call)
    assert (variables["SET_IN_A_CELL"], variables["LOCAL_DATA_DIR"]) == ("yes", "/rows")
    assert "the caller's" not in variables.values()
    assert len(variables) < len(os.environ), "what was there when this process began stays here"
    monkeypatch.setenv("SET_IN_A_CELL", "of a worker that ran a call before")
    unpack_call(pickle.dumps((variables, pickle.dumps((print, (), {})))))
    assert os.environ["SET_IN_A_CELL"] == "yes"


def test_what_cannot_be_sent_to_the_workers_is_named() -> None:
    lock = threading.Lock()

    def train(steps: int, progress: object) -> bool:
        return lock.locked()

    with pytest.raises(ConfigError, match=r"train cannot be sent to the workers, as 'lock' cannot be pickled"):
        pack_call(train, (3,), {"progress": None})
    with pytest.raises(ConfigError, match=r"as 'progress' cannot be pickled"):
        pack_call(print, (3,), {"progress": lock})


def test_every_line_opens_with_the_rank() -> None:
    out = io.StringIO()
    stream = _RankPrefix(out, 1)
    print("loss", 0.5, file=stream)  # print writes a line in pieces
    stream.write("a\nb")
    stream.write("c\n10%\r20%\r")
    stream.write("\r30%")
    expected = [
        "[rank 1] loss 0.5\n",
        "[rank 1] a\n",
        "[rank 1] bc\n",
        "[rank 1] 10%\r",
        "[rank 1] 20%\r",
        "\r[rank 1] 30%",
    ]
    assert out.getvalue() == "".join(expected)


def test_the_error_of_the_rank_that_failed_first_is_shown_with_its_rank_and_traceback() -> None:
    echo = Outcome(0, error=RuntimeError("Connection closed by peer [127.0.0.1]:1234"), trace="echo")
    own = Outcome(1, error=KeyError("loss"), trace='File "cell", line 3, in train')
    error = _worker_error([echo, own], 2, RuntimeError("of Ray Train"))
    assert error is own.error
    assert error.__notes__ == ['\nRaised by rank 1 of 2:\nFile "cell", line 3, in train']


def test_a_worker_that_died_without_an_error_is_named() -> None:
    failure = RuntimeError("The actor died")
    failure.worker_failures = {1: RuntimeError("killed")}  # type: ignore[attr-defined]
    error = _worker_error([Outcome(0, value=3)], 2, failure)
    assert isinstance(error, TrainingError)
    assert error.message.startswith("worker 1 died")


def test_a_value_that_cannot_travel_becomes_an_error() -> None:
    outcome = pickle.loads(_packed(Outcome(1, value=threading.Lock())))
    assert outcome.rank == 1
    assert isinstance(outcome.error, TrainingError)
    assert "rank 1 returned a lock, which cannot be pickled" in str(outcome.error)
    with pytest.raises(TrainingError, match="rank 1 returned a lock"):  # though no worker failed, by Ray Train
        _values([Outcome(0, value=3), outcome], 2, None)
    assert _values([Outcome(1, value=4), Outcome(0, value=3)], 2, None) == [3, 4]


def test_a_worker_that_exits_does_not_end_the_callers_program() -> None:
    def leave(code: object) -> None:
        sys.exit(code)  # type: ignore[arg-type]

    assert _call(pack_call(leave, (0,), {}), 1) == Outcome(1)
    outcome = _call(pack_call(leave, ("no data",), {}), 1)
    assert isinstance(outcome.error, TrainingError)
    assert outcome.error.message == "rank 1 left by sys.exit('no data')"
    assert "in leave" in outcome.trace


def test_an_error_made_from_an_object_comes_back_as_itself() -> None:
    class Refused(RuntimeError):
        def __init__(self, answer: SimpleNamespace):
            super().__init__(f"status {answer.status}")

    error = pickle.loads(_packed(Outcome(1, error=Refused(SimpleNamespace(status=503))))).error
    assert (type(error).__name__, str(error)) == ("Refused", "status 503")


def test_an_error_with_arguments_of_its_own_comes_back_as_itself() -> None:
    class Diverged(RuntimeError):
        def __init__(self, step: int, loss: float):
            super().__init__(f"step {step}: loss {loss}")
            self.step = step

    error = pickle.loads(_packed(Outcome(1, error=Diverged(3, 0.5)))).error
    assert (type(error).__name__, str(error), error.step) == ("Diverged", "step 3: loss 0.5", 3)
    assert isinstance(error, RuntimeError)
