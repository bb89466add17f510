"""What a distributed function asks to run on, and how the environment overrides it. Loads without Ray and torch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from training.errors import ConfigError

OVERRIDE = "POLYTHINK_DISTRIBUTED"
"""Environment variable that overrides the decorator: `workers=2` or `gpus=1,gpu_type=any`."""


@dataclass(frozen=True)
class Hardware:
    """What a function asks to run on."""

    gpus: int = 1
    """Workers with a GPU each."""
    gpu_type: str | None = None
    """Ray's accelerator type in any case (`h100`); None or `any` takes what there is."""
    workers: int = 0
    """Workers on CPU, over gloo: with `gpus=0`, or where the cluster has no GPU."""
    remote: bool = False
    """Submit a Ray Job to RAY_ADDRESS; False uses the cluster that this process is on, or starts one for itself."""

    def __post_init__(self) -> None:
        for name in ("gpus", "workers"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"{name}={value!r} is not a number of workers", field=name)
        if not self.gpus and not self.workers:
            raise ConfigError(
                "neither GPUs nor workers: there is nothing to run on",
                hint="gpus=N runs on N GPUs, gpus=0 with workers=N on CPU.",
                field="workers",
            )

    def overridden(self, text: str) -> "Hardware":
        """With what `text` (`key=value,…`) says; `workers` without `gpus` means CPU.

        Raises:
            ConfigError: an unknown key or a value of another kind.
        """
        changes: dict[str, Any] = {}
        for pair in filter(None, (part.strip() for part in text.split(","))):
            key, _, value = (part.strip() for part in pair.partition("="))
            if key not in _KINDS:
                raise ConfigError(
                    f"{OVERRIDE}={text!r}: there is no {key!r}", hint=f"Keys: {', '.join(_KINDS)}.", field=OVERRIDE
                )
            try:
                changes[key] = _KINDS[key](value)
            except (ValueError, KeyError):
                raise ConfigError(f"{OVERRIDE}={text!r}: {key} cannot be {value!r}", field=OVERRIDE) from None
        if changes.get("workers") and "gpus" not in changes:
            changes["gpus"] = 0
        return replace(self, **changes)


_KINDS: dict[str, Callable[[str], Any]] = {
    "gpus": int,
    "gpu_type": str,
    "workers": int,
    "remote": lambda text: {"true": True, "1": True, "false": False, "0": False}[text.lower()],
}
