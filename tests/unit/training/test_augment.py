"""What may be done to training rows, and that nothing is done unless asked."""

import time
from dataclasses import replace

import pytest

from tests.conftest import ROWS, with_messages
from training.config import DataConfig
from training.data import parse_rows
from training.rows.augment import (
    augment,
    balance,
    languages,
    line_first,
    mismatched,
    vary_names,
    without_near_duplicates,
)

ENGLISH = "The user asks for the capital of France. As everybody knows this is the city of Paris."


def rows_of(*records):
    return parse_rows((f"rows.jsonl:{number}", record) for number, record in enumerate(records, start=1))


@pytest.fixture
def rows():
    return rows_of(*map(with_messages, ROWS))


def system(row):
    return row.messages[0]["content"]


def test_nothing_is_done_by_default(rows):
    kept, counts = augment(rows, DataConfig(path="./rows.jsonl"), seed=1)
    assert kept == rows
    assert counts == {}


class TestMismatched:
    def test_rows_whose_reasoning_is_in_another_language_are_found(self, rows):
        wrong = rows_of(with_messages(ROWS[0] | {"analysis": ENGLISH}))
        found = mismatched([*rows, *wrong])
        assert [(mismatch.row, mismatch.verdict.detected) for mismatch in found] == [(wrong[0], "en")]

    def test_they_are_dropped_when_asked(self, rows):
        wrong = rows_of(with_messages(ROWS[0] | {"analysis": ENGLISH}))
        kept, counts = augment([*wrong, *rows], DataConfig(path="./rows.jsonl", drop_mismatched=True), seed=1)
        assert kept == rows
        assert counts == {"mismatched_dropped": 1}

    def test_reasoning_too_short_to_tell_stays(self):
        assert mismatched(rows_of(with_messages(ROWS[0] | {"analysis": "Trust it."}))) == []


class TestBalance:
    def test_rarer_languages_are_repeated_until_all_have_as_many(self, rows):
        many = rows * 1 + [rows[0]] * 4
        balanced = balance(many, seed=1)
        assert balanced[: len(many)] == many
        assert languages(balanced) == {"de": 5, "es": 5, "fr": 5, "en": 5}
        assert balance(many, seed=1) == balanced

    def test_rows_without_a_language_are_left_alone(self, rows):
        plain = rows_of({"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}) * 9
        assert languages(balance([*plain, *rows], seed=1)) == {"-": 9, "de": 1, "es": 1, "fr": 1, "en": 1}


class TestNames:
    def test_languages_are_called_in_several_ways(self, rows):
        varied = vary_names(rows[:1] * 60, seed=1)
        lines = [system(row).split("\n")[0].removeprefix("reasoning language: ") for row in varied]
        assert set(lines) == {"German", "Deutsch", "de"}
        assert 15 <= lines.count("German") <= 45
        assert all(system(row).endswith("\n\nAnswer in one sentence.") for row in varied)
        assert all(row.messages[1:] == rows[0].messages[1:] for row in varied)
        assert vary_names(rows[:1] * 60, seed=1) == varied

    def test_every_name_given_is_understood(self, rows):
        again = rows_of(*({"messages": row.messages} for row in vary_names(rows * 20, seed=2)))
        assert [row.reasoning_language for row in again] == [row.reasoning_language for row in rows * 20]

    @pytest.mark.parametrize("hostile", [" ", "\n", "\t", "a ", "\n "])
    def test_renaming_takes_linear_time(self, rows, hostile):
        text = hostile * (1_000_000 // len(hostile))
        messages = [{"role": "system", "content": f"reasoning language: German{text}x"}, *rows[0].messages[1:]]
        start = time.process_time()
        vary_names([replace(rows[0], messages=messages)], seed=1)
        assert time.process_time() - start < 5


class TestLine:
    def test_the_line_comes_first_as_serving_words_it(self):
        messages = [
            {"role": "system", "content": "Be short.\n\nReasoning language:  Deutsch\nBe kind."},
            *with_messages(ROWS[0])["messages"][1:],
        ]
        row = line_first(rows_of({"messages": messages})[0])
        assert system(row) == "reasoning language: German\n\nBe short.\n\nBe kind."

    def test_a_language_named_by_a_column_alone_gets_its_line(self):
        record = with_messages(ROWS[0])
        row = line_first(rows_of(record | {"messages": record["messages"][1:]})[0])
        assert system(row) == "reasoning language: German"
        assert row.messages[1:] == rows_of(record)[0].messages[1:]

    def test_what_is_first_already_stays(self, rows):
        assert [line_first(row) for row in rows] == rows


def test_held_out_prompts_that_are_nearly_trained_on_are_left_out(rows):
    text = "A train leaves at nine and travels for {} hours at ninety kilometres an hour without a stop; how far does it get?"
    near = [rows_of(with_messages(ROWS[0] | {"user": text.format(hours)}))[0] for hours in (3, 4)]
    assert without_near_duplicates([near[1], rows[1]], [near[0], rows[0]]) == [rows[1]]
