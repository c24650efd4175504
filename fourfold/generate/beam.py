"""Beam search: the `num_beams` most probable texts so far, extended together.

In every step the 2 `num_beams` best extensions are looked at. Those that end are set aside if they
are among the first `num_beams`; the best that do not end go on. A text that has ended scores its
log-probability divided by its length in new tokens to the power of `length_penalty`. The search
ends at `max_dec_len`; or once `num_beams` texts have ended and, with `early_stopping`, at once, or
without, when the best that goes on would not, if it ended now, score above the worst of them.

These are the rules of `transformers`. The processors (minimum length, repetition) act on
log-probabilities, which are not normalised again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fourfold.generate.decoder import SequenceModel
from fourfold.generate.sampling import Options
from fourfold.generate.session import check_finite, check_prompt, process


@dataclass(frozen=True)
class Beam:
    """New ids, the end of text included, and the sum of their log-probabilities."""

    ids: tuple[int, ...]
    logprob: float

    def score(self, length_penalty: float) -> float:
        return self.logprob / len(self.ids) ** length_penalty


@torch.inference_mode()
def beam_search(
    network: SequenceModel,
    prompt: Sequence[int],
    options: Options,
    *,
    eos_id: int | None,
    vocab_size: int | None = None,
) -> list[Beam]:
    """The best `num_return_sequences` continuations, best first."""
    check_prompt(prompt, options, network.max_positions, vocab_size)
    network.reserve(options.num_beams, len(prompt) + options.max_dec_len)
    logits = network.read([prompt])
    beams, ended = [Beam((), 0.0)], list[Beam]()
    while True:
        logits = logits[:, :vocab_size]  # (beams, V)
        check_finite(logits, network)
        extensions = _extensions(network, beams, logits, prompt, options, eos_id)
        last = len(beams[0].ids) + 1 == options.max_dec_len
        going_on = []
        for rank, (source, beam) in enumerate(extensions):
            if not last and beam.ids[-1] != eos_id:
                going_on.append((source, beam))
            elif rank < options.num_beams:
                ended.append(beam)
        ended.sort(key=lambda beam: -beam.score(options.length_penalty))
        del ended[options.num_beams :]
        going_on = going_on[: options.num_beams]
        if not going_on or _settled(going_on[0][1], ended, options):
            return ended[: options.num_return_sequences]
        network.arrange([source for source, _ in going_on])
        beams = [beam for _, beam in going_on]
        logits = network.advance([beam.ids[-1] for beam in beams])


def _extensions(
    network: SequenceModel,
    beams: list[Beam],
    logits: torch.Tensor,
    prompt: Sequence[int],
    options: Options,
    eos_id: int | None,
) -> list[tuple[int, Beam]]:
    """The best ways to go on, each with the beam it extends; best first."""
    logprobs = torch.log_softmax(logits, dim=-1)  # (beams, V)
    totals = torch.stack(
        [
            process(row, prompt, beam.ids, options, eos_id) + beam.logprob
            for beam, row in zip(beams, logprobs)
        ]
    )
    vocabulary = totals.shape[1]
    best, places = totals.flatten().topk(min(2 * options.num_beams, totals.numel()))
    agreed = network.broadcast_choices([*best.tolist(), *places.tolist()])
    found = []
    for total, place in zip(agreed[: len(best)], agreed[len(best) :]):
        source, token_id = divmod(int(place), vocabulary)
        if total > -torch.inf:
            found.append((source, Beam((*beams[source].ids, token_id), total)))
    return found


def _settled(best_going_on: Beam, ended: list[Beam], options: Options) -> bool:
    if len(ended) < options.num_beams:
        return False
    penalty = options.length_penalty
    return options.early_stopping or best_going_on.score(penalty) <= ended[-1].score(penalty)
