"""OpenAI's chat completions, spoken to by OpenAI's own client."""

from contextlib import asynccontextmanager

import httpx
import openai
import pytest

from tests.unit.serving.served import finish_job, make_app, make_generator

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def app(home, random_base):
    finish_job(home, "one", random_base)
    generator = make_generator(home, random_base)
    yield make_app(generator)
    generator.close()


@asynccontextmanager
async def openai_client(app):
    transport = httpx.ASGITransport(app)
    async with (
        httpx.AsyncClient(transport=transport) as http,
        openai.AsyncOpenAI(base_url="http://service/v1", api_key="-", http_client=http, max_retries=0) as client,
    ):
        yield client


async def complete(app, **values):
    async with openai_client(app) as client:
        values = {"model": "default", "messages": HI, "max_completion_tokens": 24, "seed": 5} | values
        return await client.chat.completions.create(**values)


async def chunks(app, **values):
    async with openai_client(app) as client:
        values = {"model": "default", "messages": HI, "max_completion_tokens": 24, "seed": 5} | values
        stream = await client.chat.completions.create(**values, stream=True)
        return [chunk async for chunk in stream]


async def test_a_completion(app):
    completion = await complete(app, extra_body={"reasoning_language": "de"})
    assert completion.object == "chat.completion"
    assert completion.model == "job:one"
    [choice] = completion.choices
    assert choice.message.role == "assistant"
    assert choice.message.reasoning_content == choice.message.reasoning
    assert choice.finish_reason in ("stop", "length")
    assert choice.reasoning_language["requested"] == "German"
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + completion.usage.completion_tokens


async def test_the_stream_joined_is_the_whole(app):
    for seed in range(2):
        values = {"seed": seed, "temperature": 1.4, "max_completion_tokens": 60}
        whole = (await complete(app, **values)).choices[0]
        parts = await chunks(app, **values, stream_options={"include_usage": True})
        assert parts[-1].choices == []
        assert parts[-1].usage.completion_tokens <= 60
        deltas = [chunk.choices[0].delta for chunk in parts[:-1]]
        assert deltas[0].role == "assistant"
        assert "".join(delta.content or "" for delta in deltas) == whole.message.content
        assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == whole.message.reasoning
        assert [chunk.choices[0].finish_reason for chunk in parts[:-1]][-1] == whole.finish_reason


async def test_without_include_usage_no_chunk_has_any(app):
    assert all(chunk.usage is None and chunk.choices for chunk in await chunks(app))


async def test_n_choices_with_seeds_of_their_own(app):
    values = {"n": 3, "temperature": 1.3}
    completion = await complete(app, **values)
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    texts = [choice.message.content + choice.message.reasoning for choice in completion.choices]
    assert len(set(texts)) > 1
    again = await complete(app, **values)
    assert [choice.message.content + choice.message.reasoning for choice in again.choices] == texts
    streamed = {0: "", 1: "", 2: ""}
    for chunk in await chunks(app, **values):
        delta = chunk.choices[0].delta
        streamed[chunk.choices[0].index] += delta.content or getattr(delta, "reasoning", None) or ""
    assert sorted(streamed.values()) == sorted(texts)


async def test_stop_ends_the_answer_before_the_string(app):
    for seed in range(20):
        answer = (await complete(app, seed=seed, temperature=1.2, max_completion_tokens=60)).choices[0].message.content
        if len(answer) > 12:
            break
    stop = answer[6:9]
    for values in ({"stop": stop}, {"stop": ["never in there", stop]}):
        choice = (await complete(app, seed=seed, temperature=1.2, max_completion_tokens=60, **values)).choices[0]
        assert choice.message.content == answer[: answer.index(stop)]
        assert choice.finish_reason == "stop"
        parts = await chunks(app, seed=seed, temperature=1.2, max_completion_tokens=60, **values)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in parts) == choice.message.content


async def test_logprobs_cover_the_answer(app, home, tiny_base):
    finish_job(home, "trained", tiny_base, ended_at=2)
    question = [{"role": "user", "content": "¿Cuál es el capital de Australia?"}]
    limits = {"max_completion_tokens": 200, "temperature": 0}
    values = {"messages": question, "model": "job:trained", "logprobs": True, "top_logprobs": 2} | limits
    choice = (await complete(app, **values)).choices[0]
    assert choice.message.reasoning
    assert choice.message.content
    scored = choice.logprobs.content
    assert all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in scored)
    assert "".join(token.token for token in scored) == choice.message.content
    streamed = [chunk.choices[0].logprobs for chunk in await chunks(app, **values)]
    assert [token.logprob for part in streamed if part for token in part.content] == [token.logprob for token in scored]


async def test_content_parts_and_earlier_turns(app):
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello.", "reasoning_content": "A greeting."},
        {"role": "user", "content": "Bye"},
    ]
    assert (await complete(app, messages=messages)).usage.prompt_tokens > (await complete(app)).usage.prompt_tokens


@pytest.mark.parametrize("content", ["", None])
async def test_an_earlier_answer_that_ended_before_it_began(app, content):
    messages = [*HI, {"role": "assistant", "content": content, "reasoning_content": "A gree"}, *HI]
    assert (await complete(app, messages=messages)).choices


async def test_models(app):
    async with openai_client(app) as client:
        names = [model.id for model in (await client.models.list()).data]
    assert names == ["default", "job:one", "adapter:one"]


@pytest.mark.parametrize(
    ("values", "kind", "param"),
    [
        ({"model": "gpt-5"}, openai.NotFoundError, "model"),
        ({"temperature": 9}, openai.BadRequestError, "temperature"),
        ({"extra_body": {"reasoning_language": "Klingonish"}}, openai.BadRequestError, "reasoning_language"),
        ({"extra_body": {"unheard_of": 1}}, openai.BadRequestError, "unheard_of"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, openai.BadRequestError, "tools"),
        ({"response_format": {"type": "json_object"}}, openai.BadRequestError, "response_format"),
        ({"presence_penalty": 1.0}, openai.BadRequestError, "presence_penalty"),
        ({"top_logprobs": 2}, openai.BadRequestError, "top_logprobs"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, openai.BadRequestError, "messages.0.role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            openai.BadRequestError,
            "messages.0.content",
        ),
        ({"messages": [{"role": "user", "content": None}]}, openai.BadRequestError, "messages.0.content"),
        ({"messages": [{"role": "user"}]}, openai.BadRequestError, "messages.0.content"),
        ({"messages": [{"role": "system", "content": "Be brief."}]}, openai.BadRequestError, "messages"),
        ({"messages": [*HI, {"role": "developer", "content": "x"}]}, openai.BadRequestError, "messages.1.role"),
        ({"messages": [HI[0] | {"reasoning": "x"}]}, openai.BadRequestError, "messages.0.reasoning"),
        ({"max_completion_tokens": 10**6}, openai.BadRequestError, "max_completion_tokens"),
        (
            {"max_completion_tokens": openai.omit, "max_tokens": 10**6},
            openai.BadRequestError,
            "max_tokens",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_have_openais_form(app, values, kind, param, stream):
    with pytest.raises(kind) as caught:
        await complete(app, **values, stream=stream)
    error = caught.value
    assert error.type == "invalid_request_error"
    assert error.param == param
    assert error.body["message"]
    assert "max_new_tokens" not in error.body["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
async def test_bodies_that_are_no_json(app, body):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as http:
        headers = {"content-type": "application/json"}
        response = await http.post("/v1/chat/completions", content=body, headers=headers)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "body"
    assert error["message"].startswith("the body")
    assert "parsing" not in error["message"], "FastAPI's own words say nothing"


async def test_fields_that_change_nothing_are_taken(app):
    neutral = {
        "presence_penalty": 0,
        "response_format": {"type": "text"},
        "user": "me",
        "store": False,
        "logit_bias": {},
    }
    assert (await complete(app, **neutral)).choices


async def test_no_model_yet_is_overloaded_with_retry_after(tmp_path):
    with pytest.raises(openai.InternalServerError) as caught:
        await complete(make_app(make_generator(tmp_path)))
    assert caught.value.status_code == 503
    assert int(caught.value.response.headers["retry-after"]) > 0
