"""Who starts next, as pure functions: a queue, what runs, and a cluster in; a decision and everybody's reason out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from serving.jobs import JobRecord, JobStatus
from training.config import ScalingConfig
from training.errors import ConfigError

Resources = Mapping[str, float]
"""Amounts by Ray's names: CPU, GPU, accelerator_type:H100, …"""

GENERATOR_YIELDS = "the generator is giving its GPUs back"
"""Ends the reason of a job for which the generator stops answering until the job has started."""
ROUNDING = 1e-6
"""Ray counts in ten-thousandths; sums of floats differ by less than this."""


@dataclass(frozen=True)
class Cluster:
    nodes: tuple[Resources, ...]
    """What each living node has in all."""
    available: Resources
    """What is free at the moment, over all nodes."""

    def total(self, name: str) -> float:
        return sum(node.get(name, 0) for node in self.nodes)


@dataclass(frozen=True)
class Limits:
    max_running: int | None
    """Jobs at once; None is bounded by the cluster alone."""
    overtake_limit: int
    """Jobs that may start before one that is ahead of them and does not fit yet."""
    generator_gpus: float = 0
    """GPUs that the generator may hold, and gives back when a job needs them."""


@dataclass(frozen=True)
class Admission:
    start: JobRecord | None
    passed: list[JobRecord] = field(default_factory=list)
    """Jobs ahead of `start` that it passes."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why each job that was looked at waits, by id."""


def worker_needs(scaling: ScalingConfig) -> dict[str, float]:
    """What one training worker takes, as Ray Train asks for it."""
    needs: dict[str, float] = {"CPU": scaling.cpus_per_worker}
    if scaling.device == "cuda":
        needs["GPU"] = 1
    if scaling.accelerator_type:
        needs[f"accelerator_type:{scaling.accelerator_type}"] = 0.001
    return needs


def job_needs(scaling: ScalingConfig) -> dict[str, float]:
    """What a job takes at least: an elastic one starts with its smallest number of workers."""
    smallest, _ = scaling.worker_range
    return {name: amount * smallest for name, amount in worker_needs(scaling).items()}


def admit(queue: Sequence[JobRecord], active: Sequence[JobRecord], cluster: Cluster, limits: Limits) -> Admission:
    """The next job to start, if one may.

    Jobs are looked at in the queue's order. One that the cluster could never hold keeps nobody waiting. One that does
    not fit at the moment may be passed by `overtake_limit` smaller ones; then everybody waits for it.
    """
    reasons: dict[str, str] = {}
    passed: list[JobRecord] = []
    free = _free(active, cluster)
    for job in queue:
        scaling = job.train_config.scaling
        if reason := never_fits(scaling, cluster):
            reasons[job.id] = reason
        elif limits.max_running is not None and len(active) >= limits.max_running:
            reasons[job.id] = f"{len(active)} jobs run, which is the limit"
        elif first := next((ahead for ahead in passed if ahead.overtaken >= limits.overtake_limit), None):
            reasons[job.id] = f"waits behind {first.id}, which {first.overtaken} jobs have passed"
        elif reason := _lack(job_needs(scaling), free):
            with_generator = {**free, "GPU": free.get("GPU", 0) + limits.generator_gpus}
            helps = not passed and not _lack(job_needs(scaling), with_generator)
            reasons[job.id] = f"{reason}; {GENERATOR_YIELDS}" if helps else reason
            passed.append(job)
        else:
            return Admission(job, passed, reasons)
    return Admission(None, reasons=reasons)


def never_fits(scaling: ScalingConfig, cluster: Cluster) -> str:
    """Why the cluster, empty, could not hold the smallest number of workers; empty when it could."""
    smallest, _ = scaling.worker_range
    needs = worker_needs(scaling)
    slots = [
        int(min(node.get(name, 0) / amount + ROUNDING for name, amount in needs.items())) for node in cluster.nodes
    ]
    places = {
        "STRICT_PACK": max(slots, default=0),
        "STRICT_SPREAD": sum(slot >= 1 for slot in slots),
    }.get(scaling.placement, sum(slots))
    if places >= smallest:
        return ""
    for name, amount in sorted(needs.items(), key=lambda need: need[0] == "CPU"):  # what is scarce first
        if cluster.total(name) + ROUNDING < amount * smallest:
            if name.startswith("accelerator_type:"):
                return f"needs {name.partition(':')[2]}, cluster has none"
            return f"needs {amount * smallest:g} {name}, cluster has {cluster.total(name):g}"
    return f"needs {smallest} workers ({_text(needs)} each, {scaling.placement}), cluster has room for {places}"


def _free(active: Sequence[JobRecord], cluster: Cluster) -> dict[str, float]:
    """What a new job may take. A job that is STARTING may not have taken its share yet, so that it is held back."""
    names = {name for node in cluster.nodes for name in node}
    taken = [(job.status, _held(job)) for job in active]
    free = {}
    for name in names:
        reserved = sum(needs.get(name, 0) for _, needs in taken)
        coming = sum(needs.get(name, 0) for status, needs in taken if status is JobStatus.STARTING)
        free[name] = min(cluster.total(name) - reserved, cluster.available.get(name, 0) - coming)
    return free


def _held(job: JobRecord) -> Resources:
    """What an active job takes; nothing where that cannot be read any more: what it has taken, Ray does not call free."""
    try:
        return job_needs(job.train_config.scaling)
    except ConfigError:
        return {}


def _lack(needs: Resources, free: Resources) -> str:
    for name, amount in sorted(needs.items(), key=lambda need: need[0] == "CPU"):
        if free.get(name, 0) + ROUNDING < amount:
            return f"needs {amount:g} {name}, {max(0.0, free.get(name, 0)):g} free"
    return ""


def _text(needs: Resources) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in needs.items())
