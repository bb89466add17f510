"""What a model says, read as it arrives: text deltas per channel, and at the end the whole answer."""

from typing import TYPE_CHECKING

from serving.answers.enforcement import opener
from serving.answers.generation import (
    Channel,
    Enforcement,
    GenerateAnswer,
    GenerateRequest,
    LanguageReport,
    ScoredToken,
    TextDelta,
    Usage,
)
from serving.answers.stop_strings import StopStrings
from serving.engines.engine import Chunk, FinishReason, TokenLogprobs
from training.language import assess, detect, language_name
from training.parsing.parsers import THINK_TAGS

if TYPE_CHECKING:
    from training.harmony import Renderer
    from training.parsing.parsers import Delta


def language_report(reasoning: str, requested: str | None) -> LanguageReport:
    if requested is None:
        detected = detect(reasoning)
        return LanguageReport(requested=None, detected=detected and language_name(detected), matches=None, share=None)
    verdict = assess(reasoning, requested)
    return LanguageReport(
        requested=language_name(requested),
        detected=verdict.detected and language_name(verdict.detected),
        matches=verdict.matches,
        share=None if verdict.undetermined else round(verdict.share, 4),
    )


class Reader:
    """What the model said so far, in one attempt at a request.

    Args:
        model: the name that the answer carries.
        opening: ids that follow the prompt and begin the reasoning; they are read as if the model had said them.
        attempt: counted from 1.
        spent_tokens: that earlier attempts generated.
    """

    def __init__(
        self,
        renderer: "Renderer",
        model: str,
        request: GenerateRequest,
        prompt_ids: list[int],
        opening: list[int],
        attempt: int,
        spent_tokens: int,
    ):
        self._tokenizer = renderer.tokenizer
        self._model = model
        self._opening = opening
        self._attempt = attempt
        self._request = request
        self._prompt_tokens = len(prompt_ids)
        self._parser = renderer.parser(prompt_ids)
        # not all_special_ids: of harmony's tokens those lack all but <|return|>
        added = renderer.tokenizer.added_tokens_decoder.items()
        self._control_ids = {id for id, token in added if token.special or token.content in THINK_TAGS}
        self._stop = StopStrings(request.stop)
        self._texts: dict[Channel, list[str]] = {"reasoning": [], "answer": []}
        self.completion_tokens = spent_tokens
        self._finish_reason: FinishReason = "length"
        self._warnings: list[str] = []
        self._scores: list[ScoredToken] = []
        self._unshown: list[ScoredToken] = []  # scored tokens whose text is not complete yet

    @property
    def stopped(self) -> bool:
        """A stop string was met."""
        return self._stop.met

    @property
    def reasoning(self) -> str:
        return "".join(self._texts["reasoning"])

    def begin(self) -> list[TextDelta]:
        """The text of the opening."""
        return self._visible(self._parser.feed(self._opening))

    def feed(self, chunk: Chunk) -> list[TextDelta]:
        self.completion_tokens += len(chunk.ids)
        self._finish_reason = chunk.finish_reason or self._finish_reason
        if not chunk.logprobs:
            return self._visible(self._parser.feed(chunk.ids))
        return [delta for pair in zip(chunk.ids, chunk.logprobs, strict=True) for delta in self._feed_scored(*pair)]

    def _feed_scored(self, token: int, scores: TokenLogprobs) -> list[TextDelta]:
        """Feeds one token; its score goes with the answer's text that it completes."""
        shown = self._visible(self._parser.feed([token]))
        if token in self._control_ids:
            self._unshown = []
            return shown
        top = [(self._token_text(other), logprob) for other, logprob in scores.top]
        self._unshown.append(ScoredToken(token=self._token_text(token), logprob=scores.logprob, top=top))
        if not shown:
            return []
        scored, self._unshown = self._unshown, []
        if shown[-1].channel == "answer":
            self._scores += scored
            shown[-1] = shown[-1].model_copy(update={"logprobs": scored})
        return shown

    def _token_text(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))

    def finish(self) -> list[TextDelta]:
        """The text that only the end decides."""
        if self.stopped:
            self._finish_reason = "stop"
        parsed = self._parser.finish(self._finish_reason)
        self._warnings = parsed.warnings
        deltas = self._visible(parsed.tail)
        return deltas + self._record("answer", self._stop.rest())

    def whole(self) -> GenerateAnswer:
        return GenerateAnswer(
            reasoning=self.reasoning,
            answer="".join(self._texts["answer"]),
            reasoning_language=language_report(self.reasoning, self._request.reasoning_language),
            finish_reason=self._finish_reason,
            warnings=self._warnings,
            enforcement=self._enforcement(),
            usage=Usage(prompt_tokens=self._prompt_tokens, completion_tokens=self.completion_tokens),
            model=self._model,
            logprobs=self._scores,
        )

    def _enforcement(self) -> Enforcement:
        language = self._request.reasoning_language
        return Enforcement(
            mode=self._request.enforce,
            attempts=self._attempt,
            opener=opener(language) if self._opening and language else None,
        )

    def _visible(self, deltas: "list[Delta]") -> list[TextDelta]:
        shown: list[TextDelta] = []
        for delta in deltas:
            if delta.channel == "analysis":
                shown += self._record("reasoning", delta.text)
            elif delta.channel == "final":
                shown += self._record("answer", self._stop.feed(delta.text))
        return shown

    def _record(self, channel: Channel, text: str) -> list[TextDelta]:
        if not text:
            return []
        self._texts[channel].append(text)
        return [TextDelta(channel=channel, text=text)]
