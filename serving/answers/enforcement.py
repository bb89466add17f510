"""Holding a model to the language it was told to reason in: trying again, or opening its reasoning for it."""

from typing import TYPE_CHECKING

from serving.answers.generation import GenerateRequest, LanguageReport
from serving.errors import RequestError
from training.reasoning.language_names import NAMES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_ATTEMPTS = 3
"""Of `enforce: retry`, the first included."""
RETRY_TEMPERATURE = 0.6
"""Of further attempts whose request is greedy: the same tokens would come again."""

OPENERS = {
    "ar": "حسنًا، لنفكر في هذا السؤال خطوة بخطوة.",
    "cs": "Dobře, zamysleme se nad tou otázkou krok za krokem.",
    "da": "Okay, lad os tænke over spørgsmålet trin for trin.",
    "de": "Gut, denken wir Schritt für Schritt über die Frage nach.",
    "el": "Ωραία, ας σκεφτούμε την ερώτηση βήμα προς βήμα.",
    "en": "Okay, let us think about the question step by step.",
    "es": "Bien, pensemos en la pregunta paso a paso.",
    "fi": "Hyvä, mietitään kysymystä askel askeleelta.",
    "fr": "Bien, réfléchissons à la question étape par étape.",
    "hi": "ठीक है, इस प्रश्न पर कदम दर कदम विचार करते हैं।",
    "hu": "Rendben, gondoljuk végig a kérdést lépésről lépésre.",
    "id": "Baik, mari kita pikirkan pertanyaan ini langkah demi langkah.",
    "it": "Bene, riflettiamo sulla domanda passo dopo passo.",
    "ja": "では、この質問について順を追って考えてみましょう。",
    "ko": "좋습니다, 이 질문을 차근차근 생각해 봅시다.",
    "nl": "Goed, laten we stap voor stap over de vraag nadenken.",
    "pl": "Dobrze, zastanówmy się nad tym pytaniem krok po kroku.",
    "pt": "Bem, vamos pensar na pergunta passo a passo.",
    "ro": "Bine, să ne gândim la întrebare pas cu pas.",
    "ru": "Хорошо, давайте подумаем над вопросом шаг за шагом.",
    "sv": "Okej, låt oss tänka igenom frågan steg för steg.",
    "tr": "Tamam, soruyu adım adım düşünelim.",
    "uk": "Добре, подумаймо над питанням крок за кроком.",
    "vi": "Được rồi, hãy suy nghĩ về câu hỏi này từng bước một.",
    "zh": "好的，让我们一步一步地思考这个问题。",
}
"""A first sentence of reasoning that fits any question, by language."""


def opener(language: str) -> str:
    """What the reasoning in `language`, a code, is opened with: a sentence, or the language's own name in brackets."""
    return OPENERS.get(language) or f"[{NAMES[language][:2][-1]}]"


def opening_ids(tokenizer: "PreTrainedTokenizerBase", language: str) -> list[int]:
    """Token ids that follow the prompt and begin the reasoning: harmony's analysis header and an opener.

    Raises:
        RequestError: the model does not speak harmony.
    """
    names = tokenizer.get_added_vocab()
    if not {"<|channel|>", "<|message|>"} <= names.keys():
        raise RequestError("enforce=prefill needs a model with harmony's channels", field="enforce")

    def text(piece: str) -> list[int]:
        return tokenizer(piece, add_special_tokens=False)["input_ids"]

    return [names["<|channel|>"], *text("analysis"), names["<|message|>"], *text(opener(language))]


def attempts(request: GenerateRequest) -> list[GenerateRequest]:
    """What to ask, in order, until the reasoning is in the language asked for: each attempt draws other tokens."""
    if request.enforce != "retry":
        return [request]
    further = {"temperature": request.temperature or RETRY_TEMPERATURE}
    seeds = [None if request.seed is None else (request.seed + number) % 2**63 for number in range(1, MAX_ATTEMPTS)]
    return [request, *(request.model_copy(update=further | {"seed": seed}) for seed in seeds)]


def is_wrong(report: LanguageReport) -> bool:
    """Whether the reasoning is surely in another language; too little text to tell is not."""
    return report.matches is False
