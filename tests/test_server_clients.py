"""Real clients, unchanged, against the server with a real model: the `openai` package, curl, and `llm`."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import api
from engine.settings import EngineSettings
from tests.serving import Client, serving
from tests.test_server import WEATHER

openai = pytest.importorskip("openai")

pytestmark = pytest.mark.skipif(api.starter_path() is None, reason="the starter model is not installed")

ASK = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def starter(compiled_kernels: None) -> Iterator[Client]:
    path = api.resolve_model(api.STARTER)
    settings = EngineSettings(context=1024)
    with serving(models={"starter": path}, engine=api.Engine, engine_settings=settings, api_key=("secret",)) as running:
        yield running


@pytest.fixture
def client(starter: Client) -> Iterator[Any]:
    with openai.OpenAI(base_url=starter.base, api_key="secret", max_retries=0) as connected:
        yield connected


def test_chat_whole_and_streamed(client: Any) -> None:
    whole = client.chat.completions.create(model="starter", messages=ASK, temperature=0, max_tokens=12)
    assert "Paris" in whole.choices[0].message.content
    assert whole.usage.completion_tokens <= 12
    stream = client.chat.completions.create(
        model="starter", messages=ASK, temperature=0, max_tokens=12, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert [model.id for model in client.models.list()] == ["starter"]


def test_every_optional_argument_as_none(client: Any) -> None:
    names = ["frequency_penalty", "logit_bias", "logprobs", "max_completion_tokens", "n", "presence_penalty"]
    names += ["response_format", "seed", "stop", "temperature", "tool_choice", "tools", "top_logprobs", "top_p"]
    names += ["parallel_tool_calls", "stream_options", "metadata", "user", "store", "functions"]
    answer = client.chat.completions.create(model="starter", messages=ASK, max_tokens=2, **dict.fromkeys(names))
    assert answer.choices[0].finish_reason == "length"


def test_tools(client: Any) -> None:
    answer = client.chat.completions.create(
        model="starter", messages=ASK, tools=[WEATHER], tool_choice="required", temperature=0, max_tokens=100
    )
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert "city" in json.loads(call.function.arguments)
    with client.chat.completions.stream(
        model="starter", messages=ASK, tools=[WEATHER], tool_choice="required", temperature=0, max_tokens=100
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
    turns = [*ASK, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert client.chat.completions.create(model="starter", messages=turns, tools=[WEATHER], max_tokens=5).choices


def test_structured_output(client: Any) -> None:
    from pydantic import BaseModel

    class City(BaseModel):
        name: str
        large: bool

    answer = client.chat.completions.parse(
        model="starter", messages=ASK, response_format=City, temperature=0, max_tokens=60
    )
    assert isinstance(answer.choices[0].message.parsed, City)


def test_completions_and_logprobs(client: Any) -> None:
    answer = client.completions.create(model="starter", prompt="The capital of France is", max_tokens=3, temperature=0)
    assert "Paris" in answer.choices[0].text
    told = (
        client.chat.completions.create(
            model="starter", messages=ASK, max_tokens=4, logprobs=True, top_logprobs=3, temperature=0
        )
        .choices[0]
        .logprobs.content
    )
    assert all(len(entry.top_logprobs) == 3 for entry in told)
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in told[:1])


def test_errors_are_the_clients_own_classes(client: Any, starter: Client) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=ASK)
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="starter", messages=[{"role": "user", "content": "word " * 3000}])
    assert refused.value.code == "context_length_exceeded"
    with (
        openai.OpenAI(base_url=starter.base, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_async_clients_side_by_side(starter: Client) -> None:
    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=starter.base, api_key="secret", max_retries=0) as client:

            async def ask(seed: int) -> str:
                stream = await client.chat.completions.create(
                    model="starter", messages=ASK, seed=seed, max_tokens=8, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

            together = await asyncio.gather(*(ask(seed) for seed in range(4)))
            alone = [await ask(seed) for seed in range(4)]
            assert together == alone
            return together

    assert len(asyncio.run(main())) == 4


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(starter: Client) -> None:
    body = json.dumps({"model": "starter", "messages": ASK, "max_tokens": 8, "temperature": 0, "stream": True})
    command = ["curl", "-sSN", "--max-time", "60", f"{starter.base}/chat/completions", "-d", body]
    command += ["-H", "Content-Type: application/json", "-H", "Authorization: Bearer secret"]
    result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=90)
    assert result.stdout.rstrip().endswith("data: [DONE]")
    form = ["curl", "-sS", "-o", os.devnull, "-w", "%{http_code}", f"{starter.base}/chat/completions", "-d", body]
    form += ["-H", "Authorization: Bearer secret"]
    assert subprocess.run(form, check=True, capture_output=True, text=True, timeout=30).stdout == "415"


def test_llm(starter: Client, tmp_path: Path) -> None:
    """Simon Willison's command-line client, with the server as one of its extra models."""
    pytest.importorskip("llm")
    described = f"- model_id: here\n  model_name: starter\n  api_base: {starter.base}\n  api_key_name: here\n"
    (tmp_path / "extra-openai-models.yaml").write_text(described, encoding="utf-8")
    environment = os.environ | {"LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": "", "PYTHONWARNINGS": "ignore"}
    options = ["-o", "temperature", "0", "-o", "max_tokens", "12"]
    result = subprocess.run(
        [sys.executable, "-m", "llm", "-m", "here", "--key", "secret", *options, "What is the capital of France?"],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout
