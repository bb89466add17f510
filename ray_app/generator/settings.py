"""What the generator may use. Loads without Ray and torch."""

from pydantic import BaseModel, ConfigDict, Field

from serving.engines.engine import EngineName


class GeneratorSettings(BaseModel):
    """What the generator may use."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: EngineName = "auto"
    """`auto` is vLLM where it is installed and `num_gpus` is not 0, else the built-in one."""
    num_gpus: float = Field(default=0, ge=0)
    """GPUs per replica; 0 answers on CPU."""
    min_replicas: int = Field(default=1, ge=0)
    """0 gives everything back while nobody asks; the next request then waits for a start."""
    max_replicas: int = Field(default=1, ge=1)
    idle_s: float = Field(default=300, gt=0)
    """Time without a request before replicas are given back."""
    max_models: int = Field(default=2, ge=1)
    """Models in memory at once, the deployed one included."""
    max_sequences: int = Field(default=32, ge=1)
    """Answers of one model generated together; more wait."""
    max_waiting: int = Field(default=128, ge=1)
    """Requests that may wait for one model before new ones get 503."""
    cache_gib: float | None = Field(default=None, gt=0)
    """Memory for keys and values of one model; None is 2 GiB on CPU, most of what is free on a GPU."""
    max_adapters: int = Field(default=8, ge=0)
    """LoRA adapters in memory per model (`adapter:ID`), served unmerged and together. 0 serves none: vLLM then chooses among all its
    kernels for MXFP4 experts, of which on Hopper only the slower one (Marlin) goes with adapters."""
    max_adapter_rank: int = Field(default=64, ge=1)
    """Largest rank of those; memory is reserved for it once the first adapter is asked for."""
    stream_interval_s: float = Field(default=0.04, ge=0, le=10)
    """Shortest time between two pieces of a streamed answer after its first; 0 sends each token as it comes."""
    context_length: int | None = Field(default=None, ge=16)
    """Most tokens of prompt and output; None is the model's own."""
    replica_timeout_s: float = Field(default=60, gt=0)
    """Longest that a request waits for a replica: training may hold what one needs."""
    load_timeout_s: float = Field(default=600, gt=0)
    """Longest that a request waits for its model."""
    request_timeout_s: float = Field(default=600, gt=0)
    """Longest that an answer may take."""
