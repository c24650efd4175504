"""Continuing a prompt: lengths, ends, seeds, windows, and options that make no sense."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fourfold.errors import UserError
from fourfold.generate import complete_text, generate
from fourfold.tokenizer import END_OF_TEXT, Tokenizer, train

VOCAB, EOS = 12, 11
OPTIONS: dict[str, Any] = {"max_dec_len": 8, "eos_id": EOS, "seed": 1, "max_positions": 64}


class Recorder:
    """Logits that depend on the whole window, and a record of the windows seen."""

    def __init__(self, eos_logit: float = -3.0) -> None:
        generator = torch.Generator().manual_seed(3)
        self.table = torch.randn(VOCAB, VOCAB, generator=generator)
        self.table[:, EOS] = eos_logit
        self.windows: list[list[list[int]]] = []

    def __call__(self, tokens: Tensor) -> Tensor:
        assert tokens.dtype == torch.int64
        self.windows.append(tokens.tolist())
        count = torch.arange(1, tokens.shape[1] + 1).view(1, -1, 1)
        return self.table[tokens].cumsum(1) / count + self.table[tokens]  # (B, T, V)


def successor(tokens: Tensor) -> Tensor:
    """The token after n is n + 1, nearly certainly."""
    return 20.0 * torch.nn.functional.one_hot((tokens + 1) % VOCAB, VOCAB).float()


def greedy(model: Any, prompt: list[int], **options: Any) -> list[list[int]]:
    return generate(model, prompt, **OPTIONS | {"decode_strategy": "greedy_search"} | options)


def test_greedy_takes_the_most_probable_and_stops_at_the_end() -> None:
    assert greedy(successor, [7]) == [[8, 9, 10, EOS]]
    assert greedy(successor, [7], max_dec_len=2) == [[8, 9]]
    assert greedy(successor, [7], max_dec_len=0) == [[]]
    assert greedy(successor, [0], temperature=0.01, top_k=1) == [[1, 2, 3, 4, 5, 6, 7, 8]]


def test_minimum_counts_new_tokens() -> None:
    assert greedy(successor, [9], min_dec_len=0) == [[10, EOS]]
    assert greedy(successor, [10], min_dec_len=0) == [[EOS]]
    longer = greedy(successor, [1, 2, 10], min_dec_len=3)[0]
    assert EOS not in longer[:3]
    assert longer[0] == 0  # the best of what is left, all others being equal


def test_forced_end_is_the_last_token() -> None:
    assert greedy(successor, [0], max_dec_len=3, force_eos=True) == [[1, 2, EOS]]


def test_without_an_end_nothing_stops_early() -> None:
    assert greedy(successor, [8], eos_id=None, max_dec_len=6) == [[9, 10, 11, 0, 1, 2]]


def test_repetition_penalty_covers_the_prompt() -> None:
    def flat(tokens: Tensor) -> Tensor:
        return torch.linspace(2.0, 1.0, VOCAB).expand(*tokens.shape, VOCAB)

    assert greedy(flat, [0], max_dec_len=3) == [[0, 0, 0]]
    assert greedy(flat, [0], max_dec_len=3, repetition_penalty=50.0) == [[1, 2, 3]]


def test_empty_prompt_starts_from_the_end_of_text() -> None:
    model = Recorder()
    generate(model, [], **OPTIONS)
    assert model.windows[0] == [[EOS]]


def test_a_seed_decides_everything() -> None:
    first = generate(Recorder(), [1, 2], num_return_sequences=4, **OPTIONS)
    assert generate(Recorder(), [1, 2], num_return_sequences=4, **OPTIONS) == first
    assert len({tuple(ids) for ids in first}) > 1
    assert generate(Recorder(), [1, 2], num_return_sequences=4, **OPTIONS | {"seed": 2}) != first
    torch.manual_seed(99)
    assert generate(Recorder(), [1, 2], num_return_sequences=4, **OPTIONS) == first


def test_sequences_do_not_depend_on_their_neighbours() -> None:
    eight = generate(Recorder(0.5), [3], num_return_sequences=8, **OPTIONS | {"max_dec_len": 20})
    for count in (1, 3):
        fewer = generate(
            Recorder(0.5), [3], num_return_sequences=count, **OPTIONS | {"max_dec_len": 20}
        )
        assert fewer == eight[:count]
    assert len({len(ids) for ids in eight}) > 1
    for ids in eight:
        assert EOS not in ids[:-1]
        assert ids[-1] == EOS or len(ids) == 20


def test_global_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    generate(Recorder(), [1], **OPTIONS)
    assert torch.equal(torch.get_rng_state(), before)


def test_window_slides_over_the_last_positions() -> None:
    model = Recorder(-30.0)
    new = generate(model, [1, 2, 3, 4, 5], **OPTIONS | {"max_positions": 4})[0]
    everything = [1, 2, 3, 4, 5, *new]
    assert len(new) == 8
    assert model.windows == [[everything[i + 1 : i + 5]] for i in range(8)]


def slow_generate(model: Any, prompt: list[int], seed_options: dict[str, Any]) -> list[int]:
    """One sequence, one step at a time; the numbers drawn are taken from `generate`'s own rule."""
    from fourfold.generate import _generator

    generator = _generator(seed_options["seed"], 0)
    tokens, new = list(prompt), []
    for step in range(seed_options["max_dec_len"]):
        row = model(torch.tensor([tokens]))[0, -1].double()
        if step < seed_options["min_dec_len"]:
            row[EOS] = -torch.inf
        for token in set(tokens):
            penalty = seed_options["repetition_penalty"]
            row[token] = row[token] * penalty if row[token] < 0 else row[token] / penalty
        weights = torch.softmax(row / seed_options["temperature"], -1).tolist()
        threshold = sorted(weights, reverse=True)[seed_options["top_k"] - 1]
        weights = [w if w >= threshold else 0.0 for w in weights]
        total = 0.0
        for token in sorted(range(VOCAB), key=lambda i: (-weights[i], i)):
            dropped = total > seed_options["top_p"]
            total += weights[token]
            if dropped:
                weights[token] = 0.0
        target = torch.rand(1, generator=generator, dtype=torch.float64).item() * sum(weights)
        chosen, reached = -1, 0.0
        while reached <= target:
            chosen += 1
            reached += weights[chosen]
        tokens.append(chosen)
        new.append(chosen)
        if chosen == EOS:
            break
    return new


@pytest.mark.parametrize("seed", range(12))
def test_sampling_equals_the_slow_reading(seed: int) -> None:
    options = {
        "max_dec_len": 15,
        "min_dec_len": 4,
        "top_k": 7,
        "top_p": 0.8,
        "temperature": 1.3,
        "repetition_penalty": 1.2,
        "seed": seed,
    }
    expected = slow_generate(Recorder(0.2), [4, 5], options)
    assert generate(Recorder(0.2), [4, 5], eos_id=EOS, max_positions=64, **options) == [expected]


def test_top_k_of_one_is_greedy() -> None:
    assert generate(Recorder(), [2], **OPTIONS | {"top_k": 1}) == greedy(Recorder(), [2])
    assert generate(Recorder(), [2], **OPTIONS | {"top_p": 0.0}) == greedy(Recorder(), [2])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"decode_strategy": "beam_search"}, "'beam_search' is not available"),
        ({"decode_strategy": "best"}, "'best' is unknown; choose sampling or greedy_search"),
        ({"max_dec_len": -1}, "max_dec_len=-1 is negative"),
        ({"min_dec_len": -1}, "min_dec_len=-1"),
        ({"min_dec_len": 9}, "min_dec_len=9 does not lie between 0 and max_dec_len=8"),
        ({"top_k": -1}, "top_k=-1 is negative"),
        ({"top_p": 1.01}, r"top_p=1\.01 is not a probability"),
        ({"top_p": -0.1}, r"top_p=-0\.1"),
        ({"top_p": float("nan")}, "top_p=nan"),
        ({"temperature": 0.0}, r"temperature=0\.0 .*greedy_search"),
        ({"temperature": -1.0}, r"temperature=-1\.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty=0\.0"),
        ({"num_return_sequences": 0}, "num_return_sequences=0"),
        ({"max_positions": 0}, "max_positions=0"),
        ({"eos_id": None, "force_eos": True}, "force_eos needs an end-of-text id"),
    ],
)
def test_senseless_options_are_refused_before_the_model_runs(
    wrong: dict[str, Any], message: str
) -> None:
    model = Recorder()
    with pytest.raises(UserError, match=message):
        generate(model, [1], **OPTIONS | wrong)
    assert model.windows == []


def test_empty_prompt_without_an_end_is_refused() -> None:
    with pytest.raises(UserError, match="the prompt is empty"):
        generate(Recorder(), [], **OPTIONS | {"eos_id": None})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_diverged_model_is_said(value: float) -> None:
    with pytest.raises(UserError, match="logits are not finite"):
        greedy(lambda tokens: torch.full((*tokens.shape, VOCAB), value), [1])


# Text


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train(["the cat sat on the mat"], 262)


def spelling(tokenizer: Tokenizer, text: str, width: int) -> Any:
    """A model that writes `text` and then ends, with a padded vocabulary it would rather use."""
    script = [*tokenizer.encode(text), tokenizer.eos_id]

    def model(tokens: Tensor) -> Tensor:
        logits = torch.zeros(*tokens.shape, width)
        logits[:, -1, script[min(model.step, len(script) - 1)]] = 50.0
        logits[..., tokenizer.vocab_size :] = 99.0
        model.step += 1
        return logits

    model.step = 0  # type: ignore[attr-defined]
    return model


def test_complete_text_is_prompt_and_continuation_without_marker(tokenizer: Tokenizer) -> None:
    model = spelling(tokenizer, " sat on the mät", width=384)
    options = {"max_dec_len": 40, "seed": 0, "max_positions": 64, "num_return_sequences": 2}
    assert complete_text(model, tokenizer, "the cat", **options) == ["the cat sat on the mät"] * 2


def test_complete_text_treats_the_prompt_as_text(tokenizer: Tokenizer) -> None:
    model = spelling(tokenizer, "!", width=262)
    options = {"max_dec_len": 5, "seed": 0, "max_positions": 64}
    assert complete_text(model, tokenizer, END_OF_TEXT, **options) == [END_OF_TEXT + "!"]
