"""Continuing prompts: lengths, ends, seeds, neighbours, and options that make no sense."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.networks import EOS, VOCAB, Recomputing, small_decoder, small_model, successor, varied
from torch import Tensor

from fourfold.errors import UserError
from fourfold.generate import Options, Session, generate
from fourfold.generate.session import stream_seed

Model = Callable[[Tensor], Tensor]


def run(model: Model, prompt: list[int], eos_id: int | None = EOS, **options: Any) -> Any:
    """The new ids, an end of text included, of each continuation."""
    options = {"max_dec_len": 8, "seed": 1, "top_k": 0} | options
    [results] = generate(Recomputing(model), [prompt], Options(**options), eos_id=eos_id)
    return [[token.id for token in result.tokens] for result in results]


def greedy(model: Model, prompt: list[int], **options: Any) -> Any:
    return run(model, prompt, decode_strategy="greedy_search", **options)


def test_greedy_takes_the_most_probable_and_stops_at_the_end() -> None:
    assert greedy(successor, [7]) == [[8, 9, 10, EOS]]
    assert greedy(successor, [7], max_dec_len=2) == [[8, 9]]
    assert greedy(successor, [0], temperature=0.01, top_k=1) == [[1, 2, 3, 4, 5, 6, 7, 8]]


def test_the_result_has_no_end_of_text_and_says_why_it_ended() -> None:
    options = Options(max_dec_len=4, decode_strategy="greedy_search")
    results = generate(Recomputing(successor), [[7], [0], [6]], options, eos_id=EOS)
    assert [one.ids for [one] in results] == [[8, 9, 10], [1, 2, 3, 4], [7, 8, 9, 10]]
    assert [one.finish for [one] in results] == ["stop", "length", "length"]


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


def test_top_k_of_one_is_greedy() -> None:
    assert run(varied(), [2], top_k=1) == greedy(varied(), [2])
    assert run(varied(), [2], top_p=0.0) == greedy(varied(), [2])


def test_a_seed_decides_everything() -> None:
    first = run(varied(), [1, 2], num_return_sequences=4)
    assert run(varied(), [1, 2], num_return_sequences=4) == first
    assert len({tuple(ids) for ids in first}) > 1
    assert run(varied(), [1, 2], num_return_sequences=4, seed=2) != first
    torch.manual_seed(99)
    before = torch.get_rng_state()
    assert run(varied(), [1, 2], num_return_sequences=4) == first
    assert torch.equal(torch.get_rng_state(), before)


def test_asking_for_more_does_not_change_the_first() -> None:
    eight = run(varied(0.5), [3], num_return_sequences=8, max_dec_len=20)
    for fewer in (1, 3):
        assert run(varied(0.5), [3], num_return_sequences=fewer, max_dec_len=20) == eight[:fewer]
    assert len({len(ids) for ids in eight}) > 1
    for ids in eight:
        assert EOS not in ids[:-1]
        assert ids[-1] == EOS or len(ids) == 20


# One prompt alone, with others, with and without a cache

PROMPTS = [[5], [7, 8, 9], list(range(20, 60)), [5, 6], [100, 3, 100, 3, 100], [150] * 17]
LONG = {"max_dec_len": 22, "min_dec_len": 0, "num_return_sequences": 2, "seed": 3}
STRATEGIES = [
    {"decode_strategy": "greedy_search"},
    {"top_k": 12, "top_p": 0.9, "temperature": 1.2},
    {"top_p": 0.7, "repetition_penalty": 1.3},
    {"top_k": 0},
]


def ids_of(results: Any) -> Any:
    return [[(one.ids, one.finish) for one in continuations] for continuations in results]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda one: "-".join(one))
def test_a_batch_gives_what_each_prompt_gives_alone_and_without_a_cache(
    strategy: dict[str, Any],
) -> None:
    options = Options(**LONG | strategy)
    decoder = small_decoder()
    endless = generate(decoder, PROMPTS, options, eos_id=None)
    eos_id = endless[1][0].ids[7]  # so that sequences end at different times
    together = ids_of(generate(decoder, PROMPTS, options, eos_id=eos_id))
    assert len({len(ids) for continuations in together for ids, _ in continuations}) > 1
    for slots in (1, 3):
        few = generate(decoder, PROMPTS, options, eos_id=eos_id, max_slots=slots)
        assert ids_of(few) == together
    plain = Recomputing(small_model())
    for prompt, expected in zip(PROMPTS, together):
        assert ids_of(generate(decoder, [prompt], options, eos_id=eos_id)) == [expected]
        assert ids_of(generate(plain, [prompt], options, eos_id=eos_id)) == [expected]


def test_sequences_may_come_and_go_at_any_time() -> None:
    options = Options(max_dec_len=9, top_k=30, seed=4)
    expected = [one.ids for [one] in generate(small_decoder(), PROMPTS, options, eos_id=None)]
    session = Session(small_decoder(), eos_id=None, slots=3)
    produced: dict[int, list[int]] = {}
    names = [session.add(PROMPTS[0], options)]
    for arrival in range(1, 40):
        for token in session.step():
            produced.setdefault(token.sequence, []).append(token.id)
        assert session.running <= 3
        if arrival % 3 == 0 and len(names) < len(PROMPTS):
            names.append(session.add(PROMPTS[len(names)], options))
    assert not session.running and not session.waiting
    assert [produced[name] for name in names] == expected


def test_a_cancelled_sequence_leaves_the_others_alone() -> None:
    options = Options(max_dec_len=9, top_k=30, seed=4)
    expected = [one.ids for [one] in generate(small_decoder(), PROMPTS, options, eos_id=None)]
    session = Session(small_decoder(), eos_id=None, slots=4)
    names = [session.add(prompt, options) for prompt in PROMPTS]
    produced: dict[int, list[int]] = {name: [] for name in names}
    step = 0
    while session.running or session.waiting:
        for token in session.step():
            produced[token.sequence].append(token.id)
        step += 1
        if step == 3:
            session.cancel(names[1])
            session.cancel(names[5])  # still waits
            session.cancel(99)
    assert 0 < len(produced[names[1]]) < 9 and produced[names[5]] == []
    for number in (0, 2, 3, 4):
        assert produced[names[number]] == expected[number]


def test_log_probabilities_are_the_models_own() -> None:
    options = Options(max_dec_len=5, top_k=3, temperature=0.7, alternatives=4, seed=2)
    model = small_model()
    [[result]] = generate(small_decoder(), [[9, 8, 7]], options, eos_id=0)
    everything = torch.tensor([[9, 8, 7, *(token.id for token in result.tokens)]])
    logprobs = torch.log_softmax(model(everything)[0].detach(), -1)
    for place, token in enumerate(result.tokens, start=2):
        assert token.logprob == pytest.approx(float(logprobs[place, token.id]), abs=1e-4)
        best, ids = logprobs[place].topk(4)
        assert [one for one, _ in token.alternatives] == ids.tolist()
        assert [p for _, p in token.alternatives] == pytest.approx(best.tolist(), abs=1e-4)


# The rules again, one sequence and one step at a time


def slow_generate(model: Model, prompt: list[int], options: dict[str, Any]) -> list[int]:
    import random

    source = random.Random(stream_seed(options["seed"], prompt, 0))
    tokens, new = list(prompt), []
    for step in range(options["max_dec_len"]):
        row = model(torch.tensor([tokens]))[0, -1].double()
        if step < options["min_dec_len"]:
            row[EOS] = -torch.inf
        for token in set(tokens):
            penalty = options["repetition_penalty"]
            row[token] = row[token] * penalty if row[token] < 0 else row[token] / penalty
        weights = torch.softmax(row / options["temperature"], -1).tolist()
        threshold = sorted(weights, reverse=True)[options["top_k"] - 1]
        weights = [w if w >= threshold else 0.0 for w in weights]
        total = 0.0
        for token in sorted(range(VOCAB), key=lambda i: (-weights[i], i)):
            dropped = total > options["top_p"]
            total += weights[token]
            if dropped:
                weights[token] = 0.0
        target = source.random() * sum(weights)
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
    expected = slow_generate(varied(0.2), [4, 5], options)
    assert run(varied(0.2), [4, 5], **options) == [expected]


# Nothing runs


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"decode_strategy": "best"}, "'best' is unknown; choose sampling, greedy_search or beam"),
        ({"max_dec_len": -1}, "max_dec_len=-1"),
        ({"max_dec_len": 0}, "max_dec_len=0"),
        ({"min_dec_len": -1}, "min_dec_len=-1"),
        ({"min_dec_len": 17}, "min_dec_len=17 does not lie between 0 and max_dec_len=16"),
        ({"top_k": -1}, "top_k=-1 is negative"),
        ({"top_p": 1.01}, r"top_p=1\.01 is not a probability"),
        ({"top_p": -0.1}, r"top_p=-0\.1"),
        ({"top_p": float("nan")}, "top_p=nan"),
        ({"temperature": 0.0}, r"temperature=0\.0 .*greedy_search"),
        ({"temperature": -1.0}, r"temperature=-1\.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty=0\.0"),
        ({"num_return_sequences": 0}, "num_return_sequences=0"),
        ({"num_beams": 3}, "num_beams=3 does not go with decode_strategy='sampling'"),
        ({"alternatives": -1}, "alternatives=-1"),
        ({"decode_strategy": "beam_search"}, "num_beams=0 is too few"),
        ({"decode_strategy": "beam_search", "num_beams": 2, "top_k": 5}, "top_k=5 does not go"),
        ({"decode_strategy": "beam_search", "num_beams": 2, "top_p": 0.5}, "top_p=0.5 does not"),
        (
            {"decode_strategy": "beam_search", "num_beams": 2, "num_return_sequences": 3},
            "num_beams=2 is too few for beam_search with num_return_sequences=3",
        ),
    ],
)
def test_senseless_options_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Options(**wrong)


@pytest.mark.parametrize("strategy", ["sampling", "beam_search"])
@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([3, VOCAB], "ids from 3 to 12, and the vocabulary goes from 0 to 11"),
        ([3, -1], "ids from -1 to 3"),
        ([1] * 60, "60 tokens, which with max_dec_len=5 is more than the 64 .* max_dec_len to 4"),
        ([1] * 64, "64 tokens.*positions there are; shorten the prompt"),
    ],
)
def test_impossible_prompts_are_refused_before_any_is_read(
    prompt: list[int], message: str, strategy: str
) -> None:
    network = Recomputing(successor)
    beams = 2 if strategy == "beam_search" else 0
    options = Options(max_dec_len=5, decode_strategy=strategy, num_beams=beams)
    with pytest.raises(UserError, match=message):
        generate(network, [[1], prompt], options, eos_id=EOS, vocab_size=VOCAB)
    assert network.windows == []


def test_prompt_and_continuation_may_fill_the_last_position() -> None:
    options = Options(max_dec_len=4, decode_strategy="greedy_search")
    prompt = list(range(60))
    expected = generate(Recomputing(small_model()), [prompt], options, eos_id=None)
    results = generate(small_decoder(), [prompt], options, eos_id=None)
    assert ids_of(results) == ids_of(expected) and len(results[0][0].ids) == 4


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_diverged_model_is_said(value: float) -> None:
    with pytest.raises(UserError, match="logits are not finite"):
        greedy(lambda tokens: torch.full((*tokens.shape, VOCAB), value), [1])


@pytest.mark.parametrize("prompt", [[5, 6, 7, 8], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]])
def test_a_sequence_that_overflows_leaves_nothing_to_those_after_it(prompt: list[int]) -> None:
    """While it writes or while its prompt is read: its slot is as good as new."""
    network, healthy = small_decoder(), [[20, 21], [22, 23, 24, 25]]
    options = Options(max_dec_len=8, decode_strategy="greedy_search")
    expected = ids_of(generate(small_decoder(), healthy, options, eos_id=None))
    positions = network.model.embeddings.position.weight
    kept = positions[9].clone()
    positions[9] = float("nan")
    with pytest.raises(UserError, match="logits are not finite"):
        generate(network, [prompt, [30, 31]], options, eos_id=None)
    positions[9] = kept
    assert ids_of(generate(network, healthy, options, eos_id=None)) == expected


def test_what_a_prompt_is_padded_with_may_overflow() -> None:
    """The padding of the shorter prompt is computed too, and then never looked at."""
    network, prompts = small_decoder(), [[20, 21], [22, 23, 24, 25]]
    options = Options(max_dec_len=6, decode_strategy="greedy_search")
    expected = ids_of(generate(network, prompts, options, eos_id=None))

    def overflow(module: object, given: tuple[Tensor], found: Tensor) -> Tensor:
        return found.masked_fill((given[0] == 0).unsqueeze(-1), float("inf"))

    network.model.embeddings.word.register_forward_hook(overflow)
    assert ids_of(generate(network, prompts, options, eos_id=None)) == expected
