"""Shared beginnings, prompts in parts and drafts: the same text, to the token, with less work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.networks import small_decoder, small_model

from fourfold.generate import Decoder, Options, Session, generate
from fourfold.generate.packed import FusedGPT, PackedMatrix
from fourfold.generate.weights import FORMATS

pytestmark = pytest.mark.skipif(small_decoder().fused is None, reason="no compiled kernels here")

SYSTEM = list(range(30, 60))
PROMPTS = [[*SYSTEM, 7, 8], [*SYSTEM, 9], [5, 6, 7], [*SYSTEM, 7, 8], [*SYSTEM[:12], 1, 2, 3]]
OPTIONS = [
    Options(max_dec_len=16, decode_strategy="greedy_search"),
    Options(max_dec_len=16, top_k=20, top_p=0.9, seed=3),
]


class Counted:
    """A decoder that counts the tokens it computes."""

    def __init__(self, network: Decoder) -> None:
        self.network, self.tokens, self.calls = network, 0, 0
        take_in = network.take_in

        def counted(parts: Any) -> torch.Tensor:
            self.tokens += sum(len(part.tokens) for part in parts)
            self.calls += 1
            return take_in(parts)

        network.take_in = counted  # type: ignore[method-assign]


def alone(prompts: list[list[int]], options: Options) -> list[list[int]]:
    return [generate(small_decoder(), [one], options, eos_id=None)[0][0].ids for one in prompts]


def texts(session: Session, prompts: list[list[int]], options: Options) -> list[list[int]]:
    names = [session.add(prompt, options) for prompt in prompts]
    found: dict[int, list[int]] = {name: [] for name in names}
    while session.running or session.waiting:
        for token in session.step():
            found[token.sequence].append(token.id)
    return [found[name] for name in names]


@pytest.mark.parametrize("options", OPTIONS, ids=["greedy", "sampling"])
@pytest.mark.parametrize("slots", [1, 2, 5])
def test_what_begins_alike_is_read_once_and_the_text_stays(options: Options, slots: int) -> None:
    counted = Counted(small_decoder())
    session = Session(counted.network, eos_id=None, slots=slots)
    expected = alone(PROMPTS, options)
    assert texts(session, PROMPTS, options) == expected
    new = sum(len(ids) - 1 for ids in expected)
    read = counted.tokens - new
    times = 1 if slots == 1 else 2  # with one row, what another prompt leaves of it
    assert read < sum(map(len, PROMPTS)) - times * len(SYSTEM)
    before = counted.tokens
    assert texts(session, PROMPTS[:1], options) == expected[:1]
    if slots == 5:  # all is still there
        assert counted.tokens - before == len(expected[0]) - 1 + 1


def test_many_continuations_of_one_prompt_read_it_once() -> None:
    counted = Counted(small_decoder())
    options = Options(max_dec_len=3, top_k=0, num_return_sequences=6, seed=1)
    [found] = generate(counted.network, [SYSTEM], options, eos_id=None)
    assert len({tuple(one.ids) for one in found}) > 1
    assert counted.tokens == len(SYSTEM) + 5 + 6 * 2


@pytest.mark.parametrize("at_once", [1, 3, 10, 31])
def test_prompts_read_in_parts_give_the_same_text(at_once: int) -> None:
    options = OPTIONS[0]
    session = Session(
        small_decoder(), eos_id=None, slots=3, prompt_tokens_at_once=at_once, draft_tokens=2
    )
    assert texts(session, PROMPTS, options) == alone(PROMPTS, options)


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("options", OPTIONS, ids=["greedy", "sampling"])
@pytest.mark.parametrize("draft", [1, 4, 7])
def test_drafts_change_no_text(weights: Any, options: Options, draft: int) -> None:
    prompts = [[5, 6, 7, 8] * 5, [9, 10, 11] * 3, [1, 2, 3, 4, 5]]
    network = Decoder(small_model(), weights)
    for some in (prompts, prompts[:1]):
        plain = generate(network, some, options, eos_id=None)
        drafted = generate(network, some, options, eos_id=None, draft_tokens=draft)
        assert [one.ids for [one] in drafted] == [one.ids for [one] in plain]


def test_a_text_that_repeats_itself_takes_fewer_steps() -> None:
    """A greedy text of a model that knows the last token alone soon runs in circles."""
    options = Options(max_dec_len=40, decode_strategy="greedy_search")
    network = small_decoder()
    assert network.model.embeddings.position is not None
    network.model.embeddings.position.weight.zero_()
    for layer in network.model.layers.values():
        layer.attn.out.matrix = PackedMatrix("float32", torch.zeros(48, 48), torch.zeros(48))
    network.fused = FusedGPT(network.model, network.head)
    counted = Counted(network)
    [[plain]] = generate(counted.network, [[3, 4, 5]], options, eos_id=None)
    steps, counted.calls = counted.calls, 0
    [[drafted]] = generate(counted.network, [[3, 4, 5]], options, eos_id=None, draft_tokens=4)
    assert drafted.ids == plain.ids
    assert counted.calls < 0.8 * steps


def test_a_draft_ends_where_the_text_ends() -> None:
    options = Options(max_dec_len=30, decode_strategy="greedy_search")
    network = small_decoder()
    [[endless]] = generate(network, [[3, 4, 5]], options, eos_id=None)
    eos_id = endless.ids[20]
    [[plain]] = generate(network, [[3, 4, 5]], options, eos_id=eos_id)
    [[drafted]] = generate(network, [[3, 4, 5]], options, eos_id=eos_id, draft_tokens=5)
    assert (drafted.ids, drafted.finish) == (plain.ids, plain.finish)
    seen: list[int] = []

    def stop_after_three(prompt: int, number: int, token: Any) -> bool:
        seen.append(token.id)
        return len(seen) == 3

    [[stopped]] = generate(
        network, [[3, 4, 5]], options, eos_id=None, draft_tokens=5, on_token=stop_after_three
    )
    assert stopped.ids == endless.ids[:3] == seen and stopped.finish == "stop"


def test_cancelled_and_new_sequences_share_rows_safely() -> None:
    options = Options(max_dec_len=9, top_k=30, seed=4)
    expected = alone(PROMPTS, options)
    session = Session(small_decoder(), eos_id=None, slots=2, prompt_tokens_at_once=8)
    names = [session.add(prompt, options) for prompt in PROMPTS]
    found: dict[int, list[int]] = {name: [] for name in names}
    for step in range(200):
        for token in session.step():
            found[token.sequence].append(token.id)
        if step == 2:
            session.cancel(names[0])
    assert not session.running and not session.waiting
    assert [found[name] for name in names[1:]] == expected[1:]
