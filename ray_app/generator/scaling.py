"""How many replicas the generator has: as many as its requests need, within bounds that PUT /deployment can change."""

import time
from pathlib import Path
from typing import Any

from ray.serve.autoscaling_policy import replica_queue_length_autoscaling_policy
from ray.serve.config import AutoscalingContext

from ray_app.generator.settings import GeneratorSettings
from serving.deployment import Autoscaling, DeployRequest, read_choice
from serving.errors import RequestError
from training.errors import ConfigError

LOOK_S = 1.0
"""Between two looks at what was chosen; Serve asks ten times a second."""


def autoscaling_config(settings: GeneratorSettings, state_file: Path) -> dict[str, Any]:
    """Serve's bounds are the widest that may be asked for; the policy keeps to those that were."""
    policy = {"state_file": str(state_file), "low": settings.min_replicas, "high": settings.max_replicas}
    return {
        "min_replicas": 0,
        "initial_replicas": settings.min_replicas,
        "max_replicas": settings.max_replicas,
        "target_ongoing_requests": settings.max_sequences,
        "downscale_delay_s": settings.idle_s,
        "policy": {"policy_function": "ray_app.generator.scaling:ChosenBounds", "policy_kwargs": policy},
    }


class ChosenBounds:
    """Serve's own policy, within the bounds of the chosen deployment, else the settings'. Runs in Serve's controller."""

    def __init__(self, state_file: str, low: int, high: int):
        self._state_file = Path(state_file)
        self._bounds = self._default = (low, high)
        self._looked_at = 0.0

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        if time.monotonic() - self._looked_at > LOOK_S:
            self._looked_at = time.monotonic()
            self._look()
        wanted, state = replica_queue_length_autoscaling_policy(context)
        low, high = self._bounds
        return min(max(wanted, low), high), state

    def _look(self) -> None:
        try:
            asked = read_choice(self._state_file).bounds
        except ConfigError:  # a broken file changes nothing; GET /deployment says that it is broken
            return
        self._bounds = (asked.min_replicas, asked.max_replicas) if asked else self._default


def check_scale(request: DeployRequest, settings: GeneratorSettings) -> None:
    """
    Raises:
        RequestError: more replicas than the service may have, or GPUs kept from training that are to be shared with it.
    """
    asked = request.bounds or Autoscaling(min_replicas=settings.min_replicas, max_replicas=settings.max_replicas)
    field = "replicas" if request.replicas else "autoscaling"
    if asked.max_replicas > settings.max_replicas:
        raise RequestError(
            f"{asked.max_replicas} replicas are more than the {settings.max_replicas} that the service may have",
            hint="POLYTHINK_GENERATOR__MAX_REPLICAS is the limit.",
            field=field,
        )
    if settings.num_gpus and asked.min_replicas > settings.min_replicas:
        raise RequestError(
            f"at least {asked.min_replicas} replicas would keep GPUs that training may need",
            hint="Ask for autoscaling with a smaller min_replicas, or set POLYTHINK_GENERATOR__MIN_REPLICAS.",
            field=field,
        )
