"""The bundled rows: made by the program, in the data set's columns, held-out prompts of their own, languages mixed."""

import json
import random
from collections import Counter
from itertools import chain
from typing import Any

import pytest

from training.language import assess
from training.tiny.corpus import PER_PAIR, TINY, Corpus, conversation, held_out_rows, training_rows

COLUMNS = ["reasoning_language", "developer", "user", "analysis", "final", "messages"]
NOTEBOOK_QUESTION = "¿Cuál es el capital de Australia?"


def read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (TINY / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus()


@pytest.fixture(scope="module", params=["train", "held_out"])
def rows(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return read(request.param)


def test_rows_are_what_the_program_writes(corpus: Corpus) -> None:
    assert read("train") == training_rows(corpus)
    assert read("held_out") == held_out_rows(corpus)


def test_rows_have_the_data_sets_columns(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert list(row) == COLUMNS
        system, user, assistant = row["messages"]
        assert [message["role"] for message in row["messages"]] == ["system", "user", "assistant"]
        assert system["content"].startswith(f"reasoning language: {row['reasoning_language']}")
        assert system["content"].endswith(row["developer"])
        assert user["content"] == row["user"]
        assert (assistant["content"], assistant["thinking"]) == (row["final"], row["analysis"])
        assert all("{" not in row[column] for column in COLUMNS[:5])


def test_each_language_is_asked_in_and_thought_in_equally_often(corpus: Corpus) -> None:
    asked_in = {question: code for code in corpus.languages for question in all_questions(corpus, code)}
    pairs = Counter((row["reasoning_language"], asked_in[row["user"]]) for row in read("train"))
    assert set(pairs.values()) == {PER_PAIR}
    assert len(pairs) == len(corpus.languages) ** 2
    counts = Counter(row["reasoning_language"] for row in read("held_out"))
    assert max(counts.values()) - min(counts.values()) <= 1
    assert all(len(questions) >= 12 for questions in corpus.held_out.values())


def test_half_of_the_rows_have_a_client_of_their_own(rows: list[dict[str, Any]]) -> None:
    assert 0.35 < sum(bool(row["developer"]) for row in rows) / len(rows) < 0.65


def all_questions(corpus: Corpus, language: str) -> list[str]:
    return [
        question for facts in corpus.facts.values() for fact in facts for question in corpus.questions(fact, language)
    ]


def test_reasoning_is_in_the_language_that_the_row_names(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert assess(row["analysis"], row["reasoning_language"]).matches, row["analysis"]


def test_no_prompt_and_no_fact_is_in_both_sets(corpus: Corpus) -> None:
    train, held_out = read("train"), read("held_out")
    assert Counter(row["user"] for row in held_out) == Counter(chain.from_iterable(corpus.held_out.values()))
    assert not {row["user"] for row in train} & {row["user"] for row in held_out}
    assert not {row["final"] for row in train} & {row["final"] for row in held_out}
    assert NOTEBOOK_QUESTION not in {row["user"] for row in train + held_out}


def test_the_base_never_sees_a_held_out_prompt_and_always_thinks_in_english(corpus: Corpus) -> None:
    rng = random.Random(5)
    excluded = frozenset(row["user"] for row in read("held_out"))
    languages = Counter()
    for _ in range(400):
        messages = conversation(corpus, rng, excluded)
        assert messages[-2]["content"] not in excluded
        thinking = messages[-1].get("thinking")
        if thinking:
            assert thinking.startswith("The user ")
        system = messages[0]["content"] if messages[0]["role"] == "system" else ""
        if "reasoning language: German" in system and thinking:
            languages[thinking.split()[0]] += 1
    assert languages["The"] > 10


def test_every_sentence_of_the_corpus_is_complete(corpus: Corpus) -> None:
    for facts in corpus.facts.values():
        for fact in facts:
            for language in corpus.languages:
                texts = [*corpus.questions(fact, language, slips=True), corpus.answer(fact, language)]
                texts.append(corpus.reasoning(fact, language, asked="es", answered="de"))
                for text in texts:
                    assert "{" not in text
                    assert "  " not in text
                    assert text[-1] in ".?!"
                    assert text[0].isupper() or text[0] in "¿¡"
