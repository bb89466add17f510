"""What became of a rewrite's tensors: hashes of what was copied, and how much of an update the written weights hold."""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from training.merging.adapter import expert_stem
from training.merging.shards import joint_xxh128


@dataclass
class Survival:
    """How much of an update is in the weights that were written, as sums over values. Rounding loses the rest."""

    wanted: float = 0.0
    """Squares of the update."""
    along: float = 0.0
    """Products of the update with the change that was written."""
    missed: float = 0.0
    """Squares of the change minus the update."""
    changed: int = 0
    """Values that differ from the source's."""
    values: int = 0

    def add(self, before: Tensor, delta: Tensor, after: Tensor) -> None:
        """Counts values; all fp32 and of one shape."""
        applied, delta = (after - before).flatten(), delta.flatten()
        self.wanted += torch.dot(delta, delta).item()
        self.along += torch.dot(applied, delta).item()
        self.changed += int(torch.count_nonzero(applied))
        self.values += applied.numel()
        applied -= delta
        self.missed += torch.dot(applied, applied).item()

    def __add__(self, other: "Survival") -> "Survival":
        return Survival(**{name: value + getattr(other, name) for name, value in asdict(self).items()})

    def as_dict(self) -> dict[str, float]:
        """`update_norm`; `kept_share`, the share of the update along its own direction; `relative_error`, the norm of
        what is missing or added over that of the update; `changed_share` of the values."""
        return {
            "update_norm": self.wanted**0.5,
            "kept_share": self.along / self.wanted if self.wanted else 0.0,
            "relative_error": (self.missed / self.wanted) ** 0.5 if self.wanted else 0.0,
            "changed_share": self.changed / self.values if self.values else 0.0,
        }


@dataclass
class Written:
    """What became of one tensor."""

    xxh128: str | None = None
    """Of the bytes, where they are the source's."""
    survival: Survival | None = None
    """Of the update, where they are computed."""


@dataclass
class Outcome:
    """What a rewrite did in all."""

    survival: dict[str, Survival]
    """By kind: `plain` (attention and other 2-D weights), `experts`."""
    copied_xxh128: str
    """Over all copied tensors; see `training.merging.shards.joint_xxh128`."""

    @classmethod
    def of(cls, written: dict[str, Written]) -> "Outcome":
        survival = {"plain": Survival(), "experts": Survival()}
        for name in sorted(written):
            survival["experts" if expert_stem(name) else "plain"] += written[name].survival or Survival()
        return cls(survival, joint_xxh128({name: step.xxh128 for name, step in written.items() if step.xxh128}))
