"""Deployments: which model answers requests that name none, on how many replicas; and the file that keeps what was chosen.

Loads without torch.
"""

import json
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from serving.engines.engine import EngineName
from serving.errors import RequestError
from serving.models.names import LATEST
from serving.schemas import Request
from training.errors import ConfigError
from training.run_dir import write_json

DEPLOYMENT_FILE = "deployment.json"
"""In POLYTHINK_HOME."""


class Autoscaling(Request):
    """Replicas follow the load between two bounds."""

    min_replicas: int = Field(default=1, ge=0)
    """0 gives everything back while nobody asks; the next request then waits for a start."""
    max_replicas: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise RequestError(
                f"min_replicas={self.min_replicas} is more than max_replicas={self.max_replicas}", field="min_replicas"
            )
        return self


class DeployRequest(Request):
    """What is to answer requests that name no model. What is left out is as the service's settings say."""

    model: str = Field(min_length=1, max_length=1000, examples=["job:ID", "models:/german@champion"])
    engine: EngineName | None = None
    replicas: int | None = Field(default=None, ge=1, le=1000)
    """As many, whatever the load."""
    autoscaling: Autoscaling | None = None

    @model_validator(mode="after")
    def _one_scale(self) -> Self:
        if self.replicas is not None and self.autoscaling is not None:
            raise RequestError("give either `replicas` or `autoscaling`, and not both", field="replicas")
        return self

    @property
    def bounds(self) -> Autoscaling | None:
        """The scale asked for; None when none was."""
        if self.replicas is None:
            return self.autoscaling
        return Autoscaling(min_replicas=self.replicas, max_replicas=self.replicas)


class Deployment(BaseModel):
    """What answers requests that name no model."""

    state: Literal["empty", "idle", "loading", "ready", "failed"]
    """`empty`: no model exists yet. `idle`: the first request loads it. `ready`: it has generated a first token."""
    model: str | None
    """The model that answers now, or will."""
    engine: EngineName | None = None
    """What it was asked to run on; None is as the service's settings say."""
    autoscaling: Autoscaling | None = None
    """The scale asked for."""
    replicas: int | None = None
    """That run now; None where nobody counts them."""
    reason: str | None = None
    """Why the last model that was to be deployed is not; the one before it keeps answering."""
    loading: str | None = None
    """A model being loaded to replace it."""
    loaded: list[str] = Field(default_factory=list)
    """Models in memory."""
    running: int = 0
    """Requests being answered."""


NEWEST = DeployRequest(model=LATEST)
"""What counts before anything was chosen."""


def read_choice(path: Path) -> DeployRequest:
    """What was chosen; `NEWEST` while nothing was.

    Raises:
        ConfigError: the file is broken.
    """
    try:
        return DeployRequest.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return NEWEST
    except (OSError, ValueError) as error:  # no JSON, no UTF-8, no such fields
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise ConfigError(f"{path} is broken: {reason}", hint="PUT /deployment writes it anew.") from None


def write_choice(path: Path, chosen: DeployRequest) -> None:
    write_json(path, chosen.model_dump(exclude_none=True))


def choose_model(path: Path, model: str) -> None:
    """Chooses another model, on the engine and scale that were chosen before."""
    try:
        chosen = read_choice(path)
    except ConfigError:
        chosen = NEWEST
    write_choice(path, chosen.model_copy(update={"model": model}))
