"""OpenAI's own client against the server: same texts as `GenerationModule`, whoever else asks."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
import torch
from helpers.served import Served, chunks, load, serving
from helpers.tiny_text_run import MODERN, make_run

from fourfold.generate.loading import load_trained
from fourfold.generate.module import GenerationModule


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60)


def expected(config: Path, prompt: str, seed: int, *overrides: str) -> list[str]:
    """Continuations by the library, with the same options."""
    module = GenerationModule(load(config, f"Generation.seed={seed}", *overrides), lambda _: None)
    return [one.text for one in module.complete([prompt])[0]]


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert model.id == "untrained" and client.models.retrieve("untrained").id == "untrained"
    with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here"):
        client.models.retrieve("gpt-4")


@pytest.mark.parametrize("seed", [3, -4])
def test_a_completion_is_what_the_library_writes(
    client: openai.OpenAI, config: Path, seed: int
) -> None:
    overrides = ["Generation.max_dec_len=24", "Generation.temperature=0.7", "Generation.top_k=7"]
    if seed < 0:
        seed, overrides = 4, [*overrides, "Generation.num_return_sequences=3"]
    wanted = expected(config, "the cat", seed, *overrides)
    asked = {"prompt": "the cat", "seed": seed, "max_tokens": 24, "temperature": 0.7}
    n, extra = len(wanted), {"top_k": 7}
    reply = client.completions.create(model="untrained", n=n, extra_body=extra, **asked)
    assert [choice.text for choice in reply.choices] == wanted
    assert reply.usage is not None and reply.usage.prompt_tokens == 2
    streamed = [""] * n
    stream = client.completions.create(
        model="untrained", n=n, extra_body=extra, stream=True, **asked
    )
    for chunk in stream:
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == wanted


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_a_modern_network_is_served(weights: str, tmp_path: Path) -> None:
    """Several texts at once, longer than its window, and the log-probabilities of a prompt."""
    run, prompts = make_run(tmp_path, **MODERN), ["the cat sat", "a dog", "the cat sat on old"]
    format_of = f"Inference.weights={weights}"
    wanted = [expected(run.config, one, 9, format_of)[0] for one in prompts]
    with serving(run.config, format_of) as server:
        reply = server.complete(prompt=prompts, seed=9, max_tokens=12).json()
        assert [choice["text"] for choice in reply["choices"]] == wanted
        asked = {"prompt": prompts[2], "echo": True, "logprobs": 1, "max_tokens": 0}
        scored = server.complete(**asked).json()["choices"][0]["logprobs"]["token_logprobs"]
    tokens = torch.tensor([run.tokenizer.encode(prompts[2])])
    logits = load_trained(run.load(), lambda _: None).model(tokens)[0]
    found = torch.log_softmax(logits[:-1, : run.tokenizer.vocab_size], -1)
    within = 1e-4 if weights == "float32" else 0.1
    own = found.gather(1, tokens[0, 1:, None])[:, 0].tolist()
    assert scored[1:] == pytest.approx(own, abs=within)


def test_neighbours_change_nothing(client: openai.OpenAI, config: Path) -> None:
    wanted = expected(config, "the dog", 9, "Generation.max_dec_len=40")

    def ask(prompt: str, seed: int, tokens: int, **named: object) -> str:
        reply = client.completions.create(
            model="untrained", prompt=prompt, seed=seed, max_tokens=tokens, **named
        )
        return reply.choices[0].text

    with ThreadPoolExecutor(5) as threads:
        others = [
            threads.submit(ask, "rain fell over old stone walls " * (n + 1), n, 30 + 7 * n, top_p=p)
            for n, p in enumerate([0.3, 0.9, 1.0, 0.5])
        ]
        found = [threads.submit(ask, "the dog", 9, 40) for _ in range(3)]
        assert [one.result() for one in found] == wanted * 3
        assert all(one.result() for one in others)


def test_several_prompts_as_texts_and_as_ids(client: openai.OpenAI, config: Path) -> None:
    module = GenerationModule(load(config, "Generation.seed=2"), lambda _: None)
    texts = ["the cat", "a dog ran"]
    wanted = [one[0].text for one in module.complete(texts)]
    ids = [module.tokenizer.encode(text) for text in texts]
    for prompt in (texts, ids):
        reply = client.completions.create(model="untrained", prompt=prompt, seed=2)
        assert [choice.text for choice in reply.choices] == wanted
    reply = client.completions.create(model="untrained", prompt=ids[1], seed=2)
    assert [choice.text for choice in reply.choices] == wanted[1:]


def test_a_seed_is_drawn_and_told(client: openai.OpenAI) -> None:
    asked = {"model": "untrained", "prompt": "the", "max_tokens": 30, "temperature": 2.0}
    first, second = (client.completions.create(**asked) for _ in range(2))
    assert first.seed != second.seed and first.choices[0].text != second.choices[0].text
    again = client.completions.create(**asked, seed=first.seed)
    assert again.choices[0].text == first.choices[0].text


def test_temperature_0_is_greedy_and_stop_strings_end(client: openai.OpenAI, config: Path) -> None:
    [whole] = expected(
        config, "the", 0, "Generation.decode_strategy=greedy_search", "Generation.max_dec_len=30"
    )
    stop = whole[6:8]
    asked = {"model": "untrained", "prompt": "the", "temperature": 0, "max_tokens": 30}
    assert client.completions.create(**asked).choices[0].text == whole
    reply = client.completions.create(**asked, stop=[stop, "never"], logprobs=0).choices[0]
    assert reply.text == whole[: whole.find(stop)] and reply.finish_reason == "stop"
    assert reply.logprobs is not None and reply.logprobs.tokens is not None
    # The tokens are those the text shows, up to one the stop string begins within.
    assert "".join(reply.logprobs.tokens).startswith(reply.text)
    assert "".join(reply.logprobs.tokens[:-1]) in reply.text


def test_echo_with_logprobs_judges_the_prompt(client: openai.OpenAI, config: Path) -> None:
    module = GenerationModule(load(config), lambda _: None)
    prompt = "the cat sat on a mat"
    ids = module.tokenizer.encode(prompt)
    with torch.inference_mode():
        hidden = module.decoder.model.hidden(torch.tensor([ids]), None, None, 0)
        table = module.decoder.logits(hidden[0])[:, :300].log_softmax(-1)
    asked = {"model": "untrained", "prompt": prompt, "echo": True, "logprobs": 3, "seed": 1}
    silent = client.completions.create(**asked, max_tokens=0).choices[0]
    spoken = client.completions.create(**asked, max_tokens=5).choices[0]
    assert silent.text == prompt and silent.finish_reason == "length"
    for reply in (silent, spoken):
        shown = reply.logprobs
        assert shown and shown.tokens and shown.token_logprobs and shown.top_logprobs
        assert shown.text_offset is not None
        assert "".join(shown.tokens) == reply.text
        assert shown.token_logprobs[0] is None
        for place, token_id in enumerate(ids[1:]):
            assert shown.token_logprobs[place + 1] == pytest.approx(
                float(table[place, token_id]), abs=1e-4
            )
            best = module.tokenizer.decode([int(table[place].argmax())])
            assert best in shown.top_logprobs[place + 1]
        for token, offset in zip(shown.tokens, shown.text_offset):
            assert reply.text[offset:].startswith(token)
    assert len(spoken.text) > len(prompt)


def test_chat_follows_the_template(client: openai.OpenAI, config: Path) -> None:
    written = "Be kind.\n\nUser: the cat\nAssistant: sat\nUser: on\nAssistant:"
    texts = (expected(config, written, seed, 'Generation.stop=["\\nUser:"]') for seed in range(50))
    seed, text = next((seed, one) for seed, [one] in enumerate(texts) if one.startswith(" "))
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "the cat"}]},
        {"role": "assistant", "content": "sat"},
        {"role": "user", "content": "on"},
    ]
    asked = {"model": "untrained", "messages": messages, "seed": seed}
    reply = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    choice = reply.choices[0]
    assert choice.message.content == text[1:] and choice.message.role == "assistant"
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert "".join(one.token for one in choice.logprobs.content) == text
    assert all(len(one.top_logprobs) == 2 for one in choice.logprobs.content)
    assert all(0 <= math.exp(one.logprob) <= 1 for one in choice.logprobs.content)
    stream = client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    received = list(stream)
    assert received[0].choices[0].delta.role == "assistant"
    parts = [choice.delta.content or "" for chunk in received for choice in chunk.choices]
    assert "".join(parts) == text[1:]
    assert received[-1].usage == reply.usage and received[-1].choices == []


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"suffix": "end"}, "suffix: is not supported"),
        ({"best_of": 3}, "best_of: is not supported"),
        ({"presence_penalty": 0.5}, "presence_penalty: is not supported"),
        ({"frequency_penalty": -1}, "frequency_penalty: is not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias: is not supported"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": 0}, "max_tokens: 0 writes nothing"),
        ({"max_tokens": 999}, "maximum context length is 256"),
        ({"prompt": ""}, "prompt: empty"),
        ({"prompt": "the cat " * 400}, "maximum context length"),
        ({"prompt": [1, 2, 999]}, "token id 999"),
        ({"n": 17}, "n: "),
        ({"prompt": ["a"] * 20, "n": 4}, "80 texts"),
        ({"stop": [""]}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options: needs stream"),
        ({"extra_body": {"top_kk": 3}}, "unknown field 'top_kk'"),
        ({"extra_body": {"min_tokens": 90}}, "min_tokens: 90 is more"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_cannot_be_done_is_refused_by_name(
    client: openai.OpenAI, fields: dict[str, object], said: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{"model": "untrained", "prompt": "the", **fields})
    assert said in caught.value.message
    body = caught.value.response.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert body["type"] == "invalid_request_error"


def test_neutral_and_harmless_fields_are_taken(served: Served) -> None:
    reply = served.complete(
        prompt="the", seed=1, presence_penalty=0, frequency_penalty=0.0, logit_bias={}, best_of=1,
        suffix=None, user="someone", metadata={"run": "7"},
    )  # fmt: skip
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"] == served.complete(prompt="the", seed=1).json()["choices"]


def test_usage_counts_a_prompt_once_and_every_new_token(served: Served) -> None:
    usage = served.complete(prompt="the cat", n=3, max_tokens=7, min_tokens=7).json()["usage"]
    assert usage == {"prompt_tokens": 2, "completion_tokens": 21, "total_tokens": 23}


def test_a_stream_carries_the_same_as_a_reply(served: Served) -> None:
    asked = {"prompt": "é☃", "seed": 3, "max_tokens": 60, "logprobs": 1, "stop": ["aa", "th"]}
    whole = served.complete(**asked).json()["choices"][0]
    pieces = [event["choices"][0] for event in chunks(served.complete(**asked, stream=True).text)]
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    assert [piece["finish_reason"] for piece in pieces][-1] == whole["finish_reason"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        parts = [value for piece in pieces for value in piece["logprobs"][name]]
        assert parts == whole["logprobs"][name]
