"""OpenAI's chat completion request, and the part of it that this service understands. Loads without torch."""

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from serving.answers.generation import (
    MAX_MESSAGES,
    MAX_STOP_STRINGS,
    Content,
    Effort,
    GenerateRequest,
    Language,
    Message,
    Role,
    StopString,
    check_order,
    check_thinking,
)
from serving.errors import RequestError
from serving.schemas import Request

DEFAULT_MODEL = "default"
"""OpenAI's clients must name a model; this one is whichever is deployed."""

IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "verbosity")
"""Fields that do not change what is answered here."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "parallel_tool_calls": (None, True, False),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
}
"""Fields that are not supported, and the values at which that makes no difference."""


def _one_text(content: Any) -> Any:
    """OpenAI's content: a text, or parts of which only texts can be taken."""
    if not isinstance(content, list):
        return content if content is not None else ""
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError("only parts of the form {'type': 'text', 'text': …} are supported")
        texts.append(part["text"])
    return "".join(texts)


class ChatMessage(Request):
    role: Role
    content: Annotated[Content, BeforeValidator(_one_text)]
    reasoning_content: str | None = None
    reasoning: str | None = None
    name: str | None = None
    refusal: None = None

    @model_validator(mode="after")
    def _only_assistants_think(self) -> Self:
        check_thinking(self.role, "reasoning_content", self.reasoning_content)
        check_thinking(self.role, "reasoning", self.reasoning)
        return self

    def plain(self) -> Message:
        return Message(role=self.role, content=self.content, thinking=self.reasoning_content or self.reasoning)


class StreamOptions(Request):
    include_usage: bool = False
    include_obfuscation: bool = False


def _stop_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value or []


class ChatRequest(Request):
    """Unsupported fields are refused unless their value makes no difference; unknown ones are refused."""

    model: str = Field(min_length=1, max_length=1000)
    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=1_000_000)
    max_tokens: int | None = Field(default=None, ge=1, le=1_000_000)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    n: int | None = Field(default=None, ge=1, le=16)
    stop: Annotated[list[StopString], BeforeValidator(_stop_list)] = Field(
        default_factory=list, max_length=MAX_STOP_STRINGS
    )
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    reasoning_effort: Effort | None = None
    reasoning_language: Language | None = None
    """Ours: what the model is told to think in. The official client sends it in `extra_body`."""

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for name, neutral in NEUTRAL.items():
            if name in values and values[name] not in neutral:
                raise RequestError(f"{name} is not supported", field=name)
        return {key: value for key, value in values.items() if key not in IGNORED and key not in NEUTRAL}

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", field="top_logprobs")
        check_order([message.role for message in self.messages])
        return self

    @property
    def limit_field(self) -> str:
        """The client's name for the limit of new tokens: OpenAI has an old one and a new one."""
        return "max_tokens" if self.max_completion_tokens is None and self.max_tokens else "max_completion_tokens"

    def requests(self) -> list[GenerateRequest]:
        """One request per choice; with a seed, each choice has its own, derived from it."""
        values: dict[str, Any] = {
            "messages": [message.plain() for message in self.messages],
            "model": None if self.model == DEFAULT_MODEL else self.model,
            "reasoning_language": self.reasoning_language,
            "reasoning_effort": self.reasoning_effort,
            "temperature": 1.0 if self.temperature is None else self.temperature,  # OpenAI's default
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "stop": self.stop,
            "stream": bool(self.stream),
            "top_logprobs": (self.top_logprobs or 0) if self.logprobs else None,
        }
        limit = self.max_completion_tokens or self.max_tokens
        if limit is not None:
            values["max_new_tokens"] = limit
        seeds = [None if self.seed is None else (self.seed + index) % 2**63 for index in range(self.n or 1)]
        return [GenerateRequest(**values, seed=seed) for seed in seeds]
