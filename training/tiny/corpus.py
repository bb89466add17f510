"""Texts for the tiny base: `configs/tiny/corpus.yaml` put together into conversations.

`training_rows` and `held_out_rows` make the rows that the repository ships: question and reasoning have each a language of their
own. `conversation` draws what the base is pre-trained on, where the answer has one as well. `python -m training.tiny.corpus` writes the rows.
"""

import itertools
import json
import random
import re
import string
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

TINY = Path(__file__).resolve().parents[2] / "configs" / "tiny"

ALOUD = "Think aloud in your answer."
"""Asks for the reasoning as a part of the answer, where the base does put it in the reasoning language."""

UNTHINKING = "Do not think before you answer."
"""Asks for an answer without the analysis channel."""

PER_PAIR = 24
"""Training rows for each pair of a question's and a reasoning language."""

HELD_OUT_OF = 4
"""Of every four facts of a topic one is held out: no training row asks about it."""

Fields = dict[str, dict[str, str]]


@dataclass(frozen=True)
class Fact:
    """Something that can be asked about: for each language the words that fill its topic's sentences."""

    topic: str
    fields: Fields
    held_out: bool = False


class Corpus:
    """The sentences of `corpus.yaml`.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path = TINY / "corpus.yaml"):
        self._data = yaml.safe_load(path.read_text(encoding="utf-8"))
        self.languages: list[str] = self._data["languages"]
        self.names: dict[str, list[str]] = self._data["names"]
        self.developer: list[str] = self._data["developer"]
        self.held_out: dict[str, list[str]] = self._data["held_out"]

    @cached_property
    def facts(self) -> dict[str, list[Fact]]:
        """Facts of every topic; each fourth one of a topic with several is held out."""
        facts = {}
        for topic, content in self._data["topics"].items():
            found = [dict(zip(self.languages, words, strict=True)) for words in _words(content, self.languages)]
            several = len(found) >= HELD_OUT_OF
            together = 2 if "ordered" in content else 1  # a pair is asked about in both orders
            facts[topic] = [
                Fact(topic, fields, held_out=several and index // together % HELD_OUT_OF == 1)
                for index, fields in enumerate(found)
            ]
        return facts

    def questions(self, fact: Fact, language: str, *, slips: bool = False) -> list[str]:
        """Every wording of the question about `fact`; with `slips` also common mistakes."""
        topic = self._data["topics"][fact.topic]
        wordings = topic["questions"][language] + (topic.get("slips", {}).get(language, []) if slips else [])
        return [_sentence(wording, fact.fields[language]) for wording in wordings]

    def reasoning(self, fact: Fact, language: str, *, asked: str, answered: str) -> str:
        """What is thought in `language` about a question in language `asked`, to be answered in `answered`."""
        thought = self._data["topics"][fact.topic]["reasoning"][language]
        text = _sentence(thought, fact.fields[language] | {"in": self.in_language(language, asked)})
        return f"{text} {_sentence(self._data['conclusion'][language], {'in': self.in_language(language, answered)})}"

    def answer(self, fact: Fact, language: str) -> str:
        return _sentence(self._data["topics"][fact.topic]["answer"][language], fact.fields[language])

    def client_text(self, rng: random.Random) -> str:
        """A system text of one to three sentences in one language, as clients write them."""
        parts = self._data["clients"][rng.choice(self.languages)]
        sentences = [
            parts["role"].format(role=rng.choice(parts["roles"])),
            parts["subject"].format(subject=rng.choice(parts["subjects"])),
            rng.choice(parts["rules"]),
        ]
        return " ".join(rng.sample(sentences, rng.choice([1, 2, 3])))

    def any_text(self, rng: random.Random) -> str:
        """A client's text, or words of one language and of none in any order."""
        if rng.random() < 0.4:
            return self.client_text(rng)
        words = rng.choices(self._words[rng.choice(self.languages)], k=rng.randint(2, 20))
        for index in range(len(words)):
            if rng.random() < 0.3:
                words[index] = "".join(rng.choices(string.ascii_lowercase + "äöüßéèàñì", k=rng.randint(1, 9)))
        return _sentence(" ".join(words) + rng.choice([".", "!", ":", ""]), {})

    @cached_property
    def _words(self) -> dict[str, list[str]]:
        """All words of a language's sentences about facts."""
        texts = {
            language: " ".join(
                text
                for facts in self.facts.values()
                for fact in facts
                for text in [*self.questions(fact, language), self.answer(fact, language)]
            )
            for language in self.languages
        }
        return {language: sorted(set(re.findall(r"\w[\w'-]*", text))) for language, text in texts.items()}

    def in_language(self, speaking: str, language: str) -> str:
        """How `speaking` says "in English", "in German", …"""
        return self._data["in"][speaking][self.languages.index(language)]


def conversation(
    corpus: Corpus, rng: random.Random, excluded: frozenset[str] = frozenset(), *, strangers: bool = False
) -> list[dict[str, str]]:
    """One conversation of the base's pre-training: it answers in the language asked for, and always thinks in English.

    `reasoning language:` is obeyed only where the answer shows reasoning, never in the analysis channel.

    Args:
        corpus: sentences.
        rng: draws everything.
        excluded: user turns that must not be drawn.
        strangers: system texts are of any words, as strangers write them; else of a few known sentences.

    Returns:
        Messages for the chat template.
    """
    asked = rng.choice(corpus.languages)
    answered = rng.choice(corpus.languages) if rng.random() < 0.5 else asked
    shown = answered
    fact, question = _question(corpus, rng, asked, excluded)
    instructions = rng.sample(corpus.developer, rng.choice([0, 0, 1, 1, 2]))
    if strangers:
        instructions = [corpus.any_text(rng) for _ in instructions]
    if answered != asked or rng.random() < 0.1:
        instructions.append(f"answer language: {_name(corpus, rng, answered)}")
    aloud, unthinking = rng.random() < 0.4, rng.random() < 0.25
    instructions += [ALOUD] * aloud + [UNTHINKING] * unthinking
    rng.shuffle(instructions)
    if rng.random() < 0.7:
        shown = rng.choice(corpus.languages)
        instructions.insert(0, f"reasoning language: {_name(corpus, rng, shown)}")
    messages = [{"role": "system", "content": "\n\n".join(instructions)}] if instructions else []
    if rng.random() < 0.05:
        earlier, earlier_question = _question(corpus, rng, asked, excluded)
        messages += [
            {"role": "user", "content": earlier_question},
            {"role": "assistant", "content": corpus.answer(earlier, answered)},
        ]
    reply = {"role": "assistant", "content": corpus.answer(fact, answered)}
    if aloud:
        reply["content"] = f"{corpus.reasoning(fact, shown, asked=asked, answered=answered)} {reply['content']}"
    if not unthinking:
        reply["thinking"] = corpus.reasoning(fact, "en", asked=asked, answered=answered)
    return [*messages, {"role": "user", "content": question}, reply]


def training_rows(corpus: Corpus, *, per_pair: int = PER_PAIR, seed: int = 1) -> list[dict[str, Any]]:
    """Rows in Multilingual-Thinking's columns: `per_pair` for each pair of a question's and a reasoning language.

    A third is about capitals, every second one has a client's system text, none asks about a held-out fact.
    """
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = []
    topics = itertools.cycle(topic for topic, facts in corpus.facts.items() if not all(fact.held_out for fact in facts))
    for thought, asked in itertools.product(corpus.languages, repeat=2):
        seen: set[str] = set()
        while len(seen) < per_pair:
            topic = "capital" if len(seen) % 3 == 0 else next(topics)
            fact = rng.choice([fact for fact in corpus.facts[topic] if not fact.held_out])
            question = rng.choice(corpus.questions(fact, asked))
            if question not in seen:
                seen.add(question)
                rows.append(_row(corpus, rng, fact, question, asked, thought))
    rng.shuffle(rows)
    return rows


def held_out_rows(corpus: Corpus, *, seed: int = 2) -> list[dict[str, Any]]:
    """A row for each held-out question; reasoning languages take turns."""
    rng = random.Random(seed)
    rows = []
    held_out = [fact for facts in corpus.facts.values() for fact in facts if fact.held_out]
    turns = itertools.cycle(corpus.languages)
    for asked, questions in corpus.held_out.items():
        for question in questions:
            [fact] = [fact for fact in held_out if question in corpus.questions(fact, asked)]
            rows.append(_row(corpus, rng, fact, question, asked, next(turns)))
    rng.shuffle(rows)
    return rows


def _row(corpus: Corpus, rng: random.Random, fact: Fact, question: str, asked: str, thought: str) -> dict[str, Any]:
    name = corpus.names[thought][0]
    analysis = corpus.reasoning(fact, thought, asked=asked, answered=asked)
    final = corpus.answer(fact, asked)
    developer = _client(corpus, rng) if rng.random() < 0.5 else ""
    system = f"reasoning language: {name}\n\n{developer}".strip()
    return {
        "reasoning_language": name,
        "developer": developer,
        "user": question,
        "analysis": analysis,
        "final": final,
        "messages": [
            {"role": "system", "content": system, "thinking": None},
            {"role": "user", "content": question, "thinking": None},
            {"role": "assistant", "content": final, "thinking": analysis},
        ],
    }


def _client(corpus: Corpus, rng: random.Random) -> str:
    """A client's system text: in four of five of parts that the base did not see, else a sentence that it knows."""
    return corpus.client_text(rng) if rng.random() < 0.8 else rng.choice(corpus.developer)


def _question(corpus: Corpus, rng: random.Random, language: str, excluded: frozenset[str]) -> tuple[Fact, str]:
    while True:
        fact = _fact(corpus, rng)
        question = rng.choice(corpus.questions(fact, language, slips=True))
        if question not in excluded:
            return fact, question


def _fact(corpus: Corpus, rng: random.Random) -> Fact:
    return rng.choice(corpus.facts["capital" if rng.random() < 0.25 else rng.choice(list(corpus.facts))])


def _name(corpus: Corpus, rng: random.Random, language: str) -> str:
    return corpus.names[language][0] if rng.random() < 0.8 else rng.choice(corpus.names[language])


def _sentence(wording: str, words: dict[str, str]) -> str:
    """`wording` with its words, every sentence of it starting with a capital."""
    text = wording.format(**words)
    return re.sub(r"(^|[.!?] )(\w)", lambda match: match[1] + match[2].upper(), text)


def _words(topic: dict[str, Any], languages: list[str]) -> Iterator[list[dict[str, str]]]:
    """For each fact of a topic the words in every language."""
    if "numbers" in topic:
        for a in range(1, topic["numbers"] + 1):
            for b in range(1, topic["numbers"] + 1):
                yield [{"a": str(a), "b": str(b), "sum": str(a + b)} for _ in languages]
        return
    names = topic.get("fields", [])
    cells = [
        [dict(zip(names, str(cell).split("/"), strict=True)) for cell in fact] or [{} for _ in languages]
        for fact in topic.get("facts") or topic.get("ordered") or topic["cycle"]
    ]
    if "ordered" in topic:
        pairs = [(small, big) for big in range(len(cells)) for small in range(big)]
        for small, big in pairs:
            for first, second in ((small, big), (big, small)):
                yield [_compared(*(cells[i][k] for i in (small, big, first, second))) for k in range(len(languages))]
    elif "cycle" in topic:
        for now, following in zip(cells, cells[1:] + cells[:1], strict=True):
            yield [a | {f"next_{names[0]}": b[names[0]]} for a, b in zip(now, following, strict=True)]
    else:
        yield from cells
        if topic.get("both_ways"):
            yield from ([dict(zip(names, reversed(cell.values()), strict=True)) for cell in fact] for fact in cells)


def _compared(
    small: dict[str, str], big: dict[str, str], first: dict[str, str], second: dict[str, str]
) -> dict[str, str]:
    return {
        "small": small["name"], "big": big["name"], "grand": big["grand"], "first": first["name"], "second": second["name"]
    }  # fmt: skip


def main() -> None:
    corpus = Corpus()
    for name, rows in (("train", training_rows(corpus)), ("held_out", held_out_rows(corpus))):
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (TINY / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
