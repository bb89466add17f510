"""Where distributed functions run: the cluster that is joined or started, and what of it they get."""

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ray_app.functions.hardware import OVERRIDE, Hardware
from training.errors import ConfigError


@dataclass(frozen=True)
class Placement:
    """How the workers are placed."""

    workers: int
    gpu: bool
    accelerator_type: str | None = None
    """As Ray spells it."""


def connect(hardware: Hardware) -> None:
    """Joins the cluster that this process is on, or starts one on this machine alone."""
    import ray
    from ray._private import ray_logging

    ray_logging.RAY_DEDUP_LOGS = False  # else it takes two ranks' lines for one, as they differ in a number only
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS", "")
    if not address or address.startswith("http"):  # that is where Ray Jobs are sent, nothing that a driver can join
        address = _address_of_up() or "auto"
    if address != "local":
        try:
            ray.init(address=address)
            return
        except ConnectionError:
            if address != "auto":
                raise
    cpus = max(os.cpu_count() or 1, hardware.gpus, hardware.workers)
    ray.init(address="local", num_cpus=cpus, include_dashboard=False)


def _address_of_up() -> str | None:
    """The Ray that `polythink up` or `join` runs on this machine, made reachable for this process."""
    from ray._private import ray_constants

    from ray_app.cluster import state as cluster_state
    from ray_app.cluster.parts import auth_environment, token_path

    cluster = cluster_state.load()
    if cluster is None or not cluster.alive("ray"):
        return None
    is_open = cluster.is_open or cluster.joined is not None
    for name, value in auth_environment(token_path() if is_open else None).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if not is_open:
        # Ray would put this machine's IP for 127.0.0.1, and such a head does not listen there. RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0
        # says the same, but is read when Ray is imported.
        ray_constants.ENABLE_RAY_CLUSTER = False
    return cluster.joined or f"{cluster.host}:{cluster.ports.ray_port}"


def place(hardware: Hardware, nodes: Sequence[Mapping[str, float]]) -> Placement:
    """Where `hardware` finds its place on `nodes`, given by their Ray resources.

    Raises:
        ConfigError: they have too few GPUs, GPUs of another type, or too few CPUs.
    """
    cpus = int(sum(node.get("CPU", 0) for node in nodes))
    has_gpu = any(node.get("GPU", 0) for node in nodes)
    if not hardware.gpus or (hardware.workers and not has_gpu):
        placement = Placement(hardware.workers, gpu=False)
    else:
        accelerator_type = _accelerator_type(hardware.gpu_type, nodes)
        having = [node for node in nodes if not accelerator_type or _resource(accelerator_type) in node]
        gpus = _gpus(having)
        if gpus < hardware.gpus:
            kind = f"{accelerator_type} GPUs" if accelerator_type else "GPUs"
            raise ConfigError(
                f"asked for {hardware.gpus} {kind}, and the cluster has {gpus}",
                hint=_way_out(hardware, gpus, nodes),
                field="gpus",
            )
        placement = Placement(hardware.gpus, gpu=True, accelerator_type=accelerator_type)
    if cpus < placement.workers:
        raise ConfigError(
            f"{placement.workers} workers want a CPU each, and the cluster has {cpus}",
            hint="Start Ray with more logical CPUs (--num-cpus), or ask for fewer workers.",
            field="workers",
        )
    return placement


def _gpus(nodes: Sequence[Mapping[str, float]]) -> int:
    return int(sum(node.get("GPU", 0) for node in nodes))


def _way_out(hardware: Hardware, gpus: int, nodes: Sequence[Mapping[str, float]]) -> str:
    """The override that runs `hardware` on `nodes`, which have `gpus` GPUs of the asked type, and maybe others."""
    others = _gpus(nodes)
    if gpus:
        return f"{OVERRIDE}='gpus={gpus}' runs it on what there is."
    if others:
        types = ", ".join(sorted(_types(nodes))) or "others"
        return f"{OVERRIDE}='gpus={min(others, hardware.gpus)},gpu_type=any' runs it on what there is ({types})."
    return f"{OVERRIDE}='workers=2' runs it on CPU (the function must guard its CUDA calls)."


def _types(nodes: Sequence[Mapping[str, float]]) -> set[str]:
    """The accelerator types of `nodes`, as Ray spells them."""
    prefix = _resource("")
    return {name.removeprefix(prefix) for node in nodes for name in node if name.startswith(prefix)}


def _accelerator_type(asked: str | None, nodes: Sequence[Mapping[str, float]]) -> str | None:
    """`asked` as the cluster spells it; None where any will do."""
    if asked is None or asked.lower() == "any":
        return None
    from ray.util import accelerators

    present = _types(nodes)
    known = present | {value for name, value in vars(accelerators).items() if name.isupper() and isinstance(value, str)}
    for name in sorted(present) + sorted(known):
        if name.lower() == asked.lower():
            return name
    near = difflib.get_close_matches(asked.upper(), sorted(known), n=3)
    raise ConfigError(
        f"gpu_type={asked!r} is no accelerator type of Ray's",
        hint=f"The cluster has {', '.join(sorted(present)) or 'none that Ray can name'}."
        + (f" Did you mean {' or '.join(near)}?" if near else " `any` takes every GPU."),
        field="gpu_type",
    )


def _resource(accelerator_type: str) -> str:
    """The resource by which Ray marks nodes with such a GPU."""
    return f"accelerator_type:{accelerator_type}"
