"""What a generation request, its events and its answer look like. Loads without torch."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, Field, ValidationInfo, model_validator

from serving.errors import RequestError
from serving.schemas import Request
from training.errors import ConfigError
from training.language import language_code

Channel = Literal["reasoning", "answer"]
Effort = Literal["low", "medium", "high"]


def _language(name: str) -> str:
    try:
        return language_code(name)
    except ConfigError as error:  # pydantic says which field it is
        raise ConfigError(error.message, hint=error.hint) from None


Language = Annotated[str, AfterValidator(_language)]
"""A language by name or code ("German", "Deutsch", "de"); becomes its code. Unknown ones are refused with near matches."""

MAX_MESSAGES = 1000
MAX_STOP_STRINGS = 16


StopString = Annotated[str, Field(min_length=1, max_length=200)]


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty")
    return text


Text = Annotated[str, Field(min_length=1), AfterValidator(_not_blank)]
"""A text that says something."""
Role = Literal["system", "developer", "user", "assistant"]


def _not_blank_but_an_assistants(text: str, info: ValidationInfo) -> str:
    return text if info.data.get("role") == "assistant" else _not_blank(text)


Content = Annotated[str, AfterValidator(_not_blank_but_an_assistants)]
"""What a turn says, in a model whose `role` comes before it. An assistant's that ended while it still reasoned says nothing."""


class Message(Request):
    """One turn. Control tokens in its text are plain text to the model."""

    role: Role
    content: Content
    thinking: str | None = None
    """An assistant's reasoning; templates show it for the last assistant turn only."""

    @model_validator(mode="after")
    def _only_assistants_think(self) -> Self:
        check_thinking(self.role, "thinking", self.thinking)
        return self


def check_thinking(role: Role, field: str, thinking: str | None) -> None:
    """
    Raises:
        RequestError: `thinking`, called `field`, of a message that is not an assistant's: no template would show it.
    """
    if thinking and role != "assistant":
        raise RequestError(f"a {role} message holds {field}: only an assistant's may", field=field)


def check_order(roles: Sequence[Role]) -> None:
    """
    Raises:
        RequestError: there is no question, or instructions come where templates leave them out without a word.
    """
    if "user" not in roles:
        raise RequestError("messages hold no user message", hint="Send a question.", field="messages")
    begin = next(index for index, role in enumerate(roles) if role in ("user", "assistant"))
    for index, role in enumerate(roles[begin:], begin):
        if role in ("system", "developer"):
            raise RequestError(
                f"messages.{index} is a {role} message after the conversation began",
                hint="Put system and developer messages first.",
                field=f"messages.{index}.role",
            )


class GenerateRequest(Request):
    """Give `prompt` or `messages`."""

    prompt: Text | None = None
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES)
    reasoning_language: Language | None = Field(default=None, examples=["German"])
    """What the model is told to think in; goes before the client's own system prompt."""
    reasoning_effort: Effort | None = None
    model: str | None = Field(default=None, min_length=1, max_length=1000, examples=["job:ID"])
    """`job:ID` (its merged model), `adapter:ID` (its adapter on the shared base), `models:/name@alias`, `models:/name/version`, a path, or `latest`; None is the deployed one."""
    max_new_tokens: int = Field(default=512, ge=1, le=1_000_000)
    """Most tokens of reasoning and answer together."""
    temperature: float = Field(default=0.6, ge=0, le=2)
    """0 takes the most likely token each time."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    stop: list[StopString] = Field(default_factory=list, max_length=MAX_STOP_STRINGS)
    """Texts before which the answer ends. They are not looked for in the reasoning."""
    enforce: Literal["none", "retry", "prefill"] = "none"
    """What is done when the reasoning is not in `reasoning_language`: nothing; up to two further attempts; or the
    reasoning is opened with a sentence in that language."""
    stream: bool = False
    """Server-sent events `reasoning` and `answer` with pieces of text, then `done` with the whole answer."""
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    """Adds log-probabilities of the answer's tokens, and of so many most likely ones at each place."""

    @model_validator(mode="after")
    def _one_conversation(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("give either `prompt` or `messages`, and not both", field="prompt")
        if self.messages is not None:
            check_order([message.role for message in self.messages])
        if self.enforce != "none" and self.reasoning_language is None:
            raise RequestError(f"enforce={self.enforce} needs a reasoning_language", field="enforce")
        return self

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as the renderer takes them."""
        if self.messages is None:
            return [{"role": "user", "content": self.prompt}]
        return [message.model_dump(exclude_none=True) for message in self.messages]


class LanguageReport(BaseModel):
    """Which language the reasoning was in."""

    requested: str | None
    """By name; None when none was asked for."""
    detected: str | None
    """By name; None when there was too little text to tell."""
    matches: bool | None
    """None when nothing was asked for, or there was too little text to tell."""
    share: float | None
    """Part of the reasoning, by letters, that is in the requested language."""


class Enforcement(BaseModel):
    """What was done to get the reasoning language."""

    mode: Literal["none", "retry", "prefill"]
    attempts: int = 1
    opener: str | None = None
    """The text that the reasoning was opened with; it is part of `reasoning`."""


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    """Of all attempts together."""


class ScoredToken(BaseModel):
    """A token of the answer with its log-probability and the likeliest ones at its place."""

    token: str
    logprob: float
    top: list[tuple[str, float]] = Field(default_factory=list)


class Started(BaseModel):
    """The first token is there. What comes before it is an exception, with a status of its own."""

    model: str
    replica_s: float = 0
    """Time until a replica had the request; long when one had to be started."""
    load_s: float = 0
    """Time that the request waited for its model to be loaded."""
    first_token_s: float = 0
    """Time from the model being there to its first token."""


class TextDelta(BaseModel):
    """A piece of text that has just become final."""

    channel: Channel
    text: str
    logprobs: list[ScoredToken] = Field(default_factory=list)
    """Of the tokens that `text` is made of; a token whose text is not complete yet comes with the one that completes it."""


class GenerateAnswer(BaseModel):
    reasoning: str
    answer: str
    reasoning_language: LanguageReport
    finish_reason: Literal["stop", "length"]
    """`stop`: the model ended. `length`: `max_new_tokens` was reached, perhaps before any answer."""
    warnings: list[str] = Field(default_factory=list)
    """What was wrong with the output's form; what is whole of it is kept."""
    enforcement: Enforcement
    usage: Usage
    model: str
    logprobs: list[ScoredToken] = Field(default_factory=list)
    """Of the answer's tokens, when `top_logprobs` was given."""


Event = Started | TextDelta | GenerateAnswer
"""A start, text deltas, and one answer; a request without `stream` gets no deltas."""
