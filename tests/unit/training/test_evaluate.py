"""Measuring the reasoning language: which prompts, which figures, the same again after an interruption."""

import json
import random
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.conftest import ROWS, with_messages
from training.config import parse_config
from training.data import parse_rows
from training.errors import ConfigError, DataError
from training.evaluate import Settings, evaluate, evaluate_before_after
from training.harmony import Parsed, Renderer
from training.reasoning.figures import heat_maps
from training.reasoning.judge import holds_answer, judge
from training.reasoning.metrics import Judged, percentile, report, wilson
from training.rows.duplicates import NearDuplicates
from training.rows.prompt_sets import Prompt, Question, answerable, cross, prompts_for, read_questions
from training.run_dir import Phase, RunDir

torch.set_num_threads(1)

MGSM = Path(__file__).resolve().parents[4] / "shared" / "data" / "multilingual"
QUICK = Settings(max_new_tokens=6, batch_size=2)
GERMAN = "Gefragt ist nach der Hauptstadt von Frankreich. Das ist bekanntlich die Stadt Paris."
ENGLISH = "The user asks for the capital of France. As everybody knows this is the city of Paris."


def questions(count, language="en", seed=0):
    words = random.Random(seed)
    texts = [" ".join("".join(words.choices("abcdefghijklmnop", k=6)) for _ in range(5)) for _ in range(count)]
    return [Question([{"role": "user", "content": text}], language) for text in texts]


def judged(asked, reasoning, answer="The capital is Paris, I am sure of that.", question="en", **changes):
    prompt = Prompt(Question([{"role": "user", "content": f"Q{asked}{question}"}], question), asked)
    return replace(judge(prompt, Parsed(reasoning, answer, "stop"), 10), **changes)


class TestPromptSets:
    def test_rows_become_questions_without_a_word_on_the_language(self):
        rows = parse_rows((f"rows:{n}", with_messages(row)) for n, row in enumerate(ROWS))
        prompts = prompts_for(rows, None, 16, seed=1)
        assert {p.reasoning_language for p in prompts} == {"de", "es", "fr", "en"}
        assert len(prompts) == 16  # 4 questions in each of 4 languages
        assert all("reasoning language" not in str(p.question.messages) for p in prompts)
        assert all(m["role"] != "assistant" for p in prompts for m in p.question.messages)
        by_text = {p.question.text: p.question for p in prompts}
        assert by_text["What is the capital of France?"].messages[0] == {
            "role": "system",
            "content": "Answer in one sentence.",
        }
        assert by_text["¿Qué día viene después del lunes?"].language == "es"

    def test_prompts_are_spread_over_languages_and_questions(self):
        mixed = questions(20, "en") + questions(10, "de", seed=1)
        prompts = cross(mixed, ["German", "fr", "Spanish"], 31, seed=3)
        counts = [sum(p.reasoning_language == code for p in prompts) for code in ("de", "fr", "es")]
        assert counts == [11, 10, 10]
        for code in ("de", "fr", "es"):
            languages = [p.question.language for p in prompts if p.reasoning_language == code]
            assert min(languages.count("en"), languages.count("de")) >= 3

    def test_a_seed_gives_the_same_prompts_whatever_the_order_of_languages_given_twice(self):
        assert cross(questions(20), ["de", "German", "fr"], 9, seed=3) == cross(questions(20), ["de", "fr"], 9, seed=3)
        assert cross(questions(20), ["de"], 9, seed=3) != cross(questions(20), ["de"], 9, seed=4)

    def test_fewer_questions_give_fewer_prompts_never_the_same_twice(self):
        prompts = cross(questions(4), ["de", "fr"], 100, seed=0)
        assert len({p.id for p in prompts}) == len(prompts) == 8

    @pytest.mark.parametrize(("asked", "error"), [(["Klingon"], ConfigError), ([], DataError)])
    def test_no_language_is_an_error(self, asked, error):
        with pytest.raises(error):
            cross(questions(2), asked, 2, seed=0)

    def test_no_rows_are_an_error(self):
        with pytest.raises(DataError, match="no questions"):
            prompts_for([], ["de"], 4, seed=0)

    def test_short_questions_follow_the_language_of_their_set(self):
        texts = ["¿Cuál es la capital de Australia?", "¿Cuántos días tiene una semana?", "¿De qué color es la nieve?"]
        prompts = cross([Question([{"role": "user", "content": text}]) for text in texts], ["de"], 3, seed=0)
        assert {p.question.language for p in prompts} == {"es"}

    def test_mgsm_has_answers(self):
        if not MGSM.is_dir():
            pytest.skip(f"{MGSM} is not there")
        read = read_questions(MGSM / "mgsm_de.tsv")
        assert len(read) == 250
        assert read[0].answer == "18"
        assert {p.question.language for p in cross(read, ["French"], 20, seed=0)} == {"de"}

    def test_jsonl_of_prompts_or_messages(self, tmp_path):
        path = tmp_path / "set.jsonl"
        lines = [
            {"prompt": "Was?", "answer": 7},
            {"question": "Wer?", "answer": " "},
            {"messages": with_messages(ROWS[0])["messages"]},
        ]
        path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
        read = read_questions(path)
        assert [question.text for question in read] == ["Was?", "Wer?", "What is the capital of France?"]
        assert [question.answer for question in read] == ["7", None, None]

    def test_a_prompt_that_leaves_no_room_is_left_out_unread(self, random_base, caplog, monkeypatch):
        renderer = Renderer(AutoTokenizer.from_pretrained(random_base))
        records = [ROWS[0], ROWS[1] | {"user": "Why? " * 1_000_000}, ROWS[2] | {"user": "Why? " * 300}]
        rows = parse_rows((f"rows.jsonl:{number}", record) for number, record in enumerate(records, start=1))
        render, rendered = Renderer.prompt_ids, []
        monkeypatch.setattr(Renderer, "prompt_ids", lambda *a, **k: rendered.append(a[1]) or render(*a, **k))
        kept = answerable(rows, renderer, context=1000, max_new_tokens=100)
        assert len(rendered) == 1, "rendering the longest takes ten seconds"
        assert kept == rows[:1]
        assert "rows.jsonl:2, rows.jsonl:3" in caplog.text
        assert answerable(rows[:1], renderer, context=None, max_new_tokens=100) == rows[:1]

    @pytest.mark.parametrize(
        "line",
        [
            "{",
            "[]",
            "{}",
            '{"prompt": 3}',
            '{"messages": [{"role": "assistant", "content": "a"}]}',
            '{"messages": [1]}',
            '"x"',
        ],
    )
    def test_a_line_without_a_question_is_named(self, tmp_path, line):
        path = tmp_path / "set.jsonl"
        path.write_text('{"prompt": "Was?"}\n' + line)
        with pytest.raises(DataError, match=r"set\.jsonl:2"):
            read_questions(path)

    @pytest.mark.parametrize("content", [b"", b"\n\n", b"\xff\xfe\x00"])
    def test_a_file_without_prompts_is_refused(self, tmp_path, content):
        path = tmp_path / "set.jsonl"
        path.write_bytes(content)
        with pytest.raises(DataError):
            read_questions(path)


class TestNearDuplicates:
    def test_a_changed_number_is_near_a_changed_subject_is_not(self):
        seen = NearDuplicates()
        text = "A train leaves the station at nine and travels for {} hours at ninety kilometres an hour; how far does it get?"
        assert seen.add(text.format(3))
        assert not seen.add(text.format(4))
        assert not seen.add(text.format(3).upper() + "  !")
        assert text.format(5) in seen
        assert seen.add("What is the capital of France?")
        assert seen.add("What is the capital of Australia?")

    @settings(max_examples=50, deadline=None)
    @given(st.lists(st.text(alphabet="abc ", max_size=30), max_size=12))
    def test_the_index_finds_what_comparing_all_pairs_finds(self, texts):
        seen, kept = NearDuplicates(), []

        def grams(text):
            folded = "".join(c for c in text if c.isalnum())
            return {folded[i : i + 5] for i in range(max(1, len(folded) - 4))}

        for text in texts:
            near = any(len(grams(text) & grams(k)) / len(grams(text) | grams(k)) >= 0.85 for k in kept)
            assert seen.add(text) == (not near)
            if not near:
                kept.append(text)


class TestMetrics:
    def test_wilson_matches_published_values(self):
        # Newcombe 1998, table I: 81/263, 15/148, 0/20, 1/29
        for hits, n, low, high in [
            (81, 263, 0.2553, 0.3662),
            (15, 148, 0.0624, 0.1605),
            (0, 20, 0.0, 0.1611),
            (1, 29, 0.0061, 0.1718),
        ]:
            assert wilson(hits, n) == pytest.approx((low, high), abs=1e-4)
        assert wilson(0, 0) == (0.0, 1.0)

    def test_english_is_reported_apart(self):
        figures = report([judged("de", GERMAN), judged("fr", ENGLISH), judged("en", ENGLISH)])
        assert figures["prompts"] == 2
        assert figures["trace_match"] == 0.5
        assert figures["english"]["trace_match"] == 1.0
        assert figures["by_language"]["fr"]["trace_match"] == 0.0
        assert figures["matrix"]["en"] == {
            "de": {"prompts": 1, "trace_match": 1.0},
            "en": {"prompts": 1, "trace_match": 1.0},
            "fr": {"prompts": 1, "trace_match": 0.0},
        }

    def test_cross_cases_are_those_whose_question_is_in_another_language(self):
        figures = report([judged("de", GERMAN, question="de"), judged("de", ENGLISH, question="en")])
        assert figures["cross"]["prompts"] == 1
        assert figures["cross"]["trace_match"] == 0.0

    def test_a_trace_too_short_is_a_miss_and_counted(self):
        figures = report([judged("de", ""), judged("de", GERMAN)])
        assert (figures["trace_match"], figures["undetermined"], figures["purity"]) == (0.5, 1, 0.5)

    def test_an_answer_too_short_to_tell_is_left_out(self):
        figures = report([judged("de", GERMAN, answer="7"), judged("de", GERMAN), judged("de", GERMAN, answer=GERMAN)])
        assert figures["answer_language_match"] == 0.5

    def test_rates_over_nothing_are_none(self):
        figures = report([])
        assert figures["trace_match"] is None
        assert figures["purity"] is None
        assert figures["accuracy"] is None

    def test_percentiles_are_values_that_occur(self):
        assert percentile([0.1, *[1.0] * 19], 0.05) == 0.1
        assert percentile([0.1, *[1.0] * 20], 0.05) == 1.0
        assert percentile([0.3], 0.05) == 0.3


@pytest.mark.parametrize(
    ("text", "expected", "right"),
    [
        ("Sie verdient 18 Dollar.", "18", True),
        ("First 3, then 4: in all 7 apples", "7", True),
        ("7, not 8", "7", False),
        ("Der Gewinn ist 70.000 US-Dollar.", "70000", True),
        ("The profit is $70,000.", "70000", True),
        ("Le bénéfice est de 70 000 dollars.", "70000", True),
        ("Es sind 0,5 Liter.", "0.5", True),
        ("It is 1,234.50 dollars", "1234.5", True),
        ("উত্তর হল ১১।", "11", True),
        ("-3 degrees", "-3", True),
        ("The other numbers are 1, 2, 3", "3", True),
        ("In 2020 500 were sold", "500", True),
        ("They are 12'345.50 francs", "12345.5", True),
        ("No idea.", "18", False),
        ("", "18", False),
        ("The capital is Canberra.", "canberra", True),
        ("The capital is Canberra.", "Sydney", False),
        ("The capital is Canberra.", "berra", False),
        ("It is written in C++.", "C++", True),
        ("澳大利亚的首都是堪培拉。", "堪培拉", True),
        ("수도는 캔버라입니다.", "캔버라", True),
        ("เมืองหลวงคือแคนเบอร์ราครับ", "แคนเบอร์รา", True),
        ("", "Sydney", False),
    ],
)
def test_answers_are_found_as_people_write_them(text, expected, right):
    assert holds_answer(text, expected) is right


class TestEvaluate:
    prompts = cross(questions(5), ["de", "fr"], 5, seed=0)

    def test_an_interrupted_evaluation_goes_on_and_gives_the_same(self, random_base, tmp_path):
        sampled = replace(QUICK, temperature=1.0)
        whole = evaluate(random_base, self.prompts, sampled)
        path = tmp_path / "responses.jsonl"

        def stop(done, total):
            assert total == 5
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            evaluate(random_base, self.prompts, sampled, path, stop)
        path.write_text(path.read_text() + '{"prompt_id": "torn')
        seen = []
        again = evaluate(random_base, self.prompts, sampled, path, lambda *done: seen.append(done))
        assert seen == [(4, 5), (5, 5)]  # the first batch is not asked again
        assert again == whole
        assert evaluate(random_base, self.prompts, sampled, path, stop) == whole

    def test_one_that_is_killed_while_it_begins_keeps_what_there_was(self, random_base, tmp_path, monkeypatch):
        path = tmp_path / "responses.jsonl"
        evaluate(random_base, self.prompts, QUICK, path)
        before = path.read_text()

        def die(value):
            if isinstance(value, Judged):
                raise KeyboardInterrupt
            return asdict(value)

        monkeypatch.setattr("training.evaluate.asdict", die)
        with pytest.raises(KeyboardInterrupt):
            evaluate(random_base, self.prompts, QUICK, path)
        assert path.read_text() == before

    def test_other_settings_start_anew(self, random_base, tmp_path):
        path = tmp_path / "responses.jsonl"
        first = evaluate(random_base, self.prompts, QUICK, path)
        second = evaluate(random_base, self.prompts, replace(QUICK, max_new_tokens=3), path)
        assert max(response.completion_tokens for response in first.responses) == 6
        assert max(response.completion_tokens for response in second.responses) == 3

    def test_a_job_s_evaluation_is_on_disk_in_figures_and_samples(self, random_base, tmp_path):
        config = parse_config(
            {
                "model": {"path": str(random_base)},
                "data": {"path": "./rows.jsonl", "current_date": "2025-08-05"},
                "scaling": {"device": "cpu"},
                "evaluation": {"prompts": 8, "max_new_tokens": 8},
            }
        ).resolved()
        run_dir = RunDir.create(tmp_path / "run", config)
        rows = parse_rows((f"rows:{n}", with_messages(row)) for n, row in enumerate(ROWS))
        result = evaluate_before_after(config, run_dir, random_base, random_base, rows)
        assert result["before"] == result["after"]
        assert result["before"]["prompts"] + result["before"]["english"]["prompts"] == 8
        assert {sample["reasoning_language"] for sample in result["samples"]} == {"de", "es", "fr", "en"}
        assert json.loads((run_dir.evaluation / "evaluation.json").read_text()) == result
        assert (run_dir.evaluation / "trace_match.png").read_bytes().startswith(b"\x89PNG")
        assert run_dir.progress()["phase"] == Phase.EVALUATING
        assert run_dir.progress()["message"] == "asking the tuned model: 8 of 8 prompts"


def test_a_set_with_answers_gives_an_accuracy(random_base, tmp_path):
    path = tmp_path / "set.jsonl"
    lines = [
        {"prompt": "Was ist die Hauptstadt von Frankreich?", "answer": "Paris"},
        {"prompt": "Wie viele Tage hat eine Woche?"},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    found = evaluate(random_base, cross(read_questions(path), ["French", "de"], 4, seed=0), QUICK).as_dict()
    assert found["prompts"] == 4
    assert found["matrix"].keys() == {"de"}
    assert found["accuracy"] == 0.0  # of the two prompts that have an answer: random weights do not know it


def test_the_second_identifier_s_disagreement_is_a_rate_of_its_own():
    responses = [
        judged("de", GERMAN, second="de"),
        judged("de", GERMAN, second="nl"),
        judged("de", GERMAN, second=None),
        judged("de", ""),
    ]
    assert report(responses)["identifiers_disagree"] == 0.5
    assert (
        report([judged("hr", "Korisnik pita koji je glavni grad Australije.", second="sr")])["identifiers_disagree"]
        == 0.0
    )


def test_a_heat_map_may_have_holes_and_unknown_languages(tmp_path):
    reports = {
        "one": report([judged("de", GERMAN), judged("de", GERMAN, question=None)]),
        "two": report([judged("fr", ENGLISH)]),
        "none": report([]),
    }
    assert heat_maps(reports, tmp_path / "figures" / "x.png").stat().st_size > 1000
