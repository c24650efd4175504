"""How probable the model finds a prompt: what `echo` with `logprobs` asks, and evaluators with it.

Letters: T positions, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fourfold.generate import Decoder, Token

# Rows of logits held at a time.
LOGIT_ROWS = 256


@torch.inference_mode()
def judge(
    decoder: Decoder, prompt: Sequence[int], alternatives: int, vocab_size: int
) -> list[Token]:
    """The prompt's tokens, each with its log-probability after all before it.

    The first follows nothing and has none.
    """
    tokens = [Token(sequence=0, id=prompt[0])]
    if len(prompt) == 1:
        return tokens
    inputs = torch.tensor([prompt[:-1]], device=decoder.device)  # (1, T)
    labels = torch.tensor(prompt[1:], device=decoder.device)  # (T,)
    x = decoder.model.hidden(inputs, None, None, 0)[0]  # (T, D)
    for rows, wanted in zip(x.split(LOGIT_ROWS), labels.split(LOGIT_ROWS)):
        logprobs = decoder.logits(rows)[:, :vocab_size].log_softmax(dim=-1)  # (rows, V)
        chosen = logprobs.gather(1, wanted.unsqueeze(1)).squeeze(1).tolist()
        best, ids = logprobs.topk(min(alternatives, vocab_size), dim=-1)
        for token_id, logprob, pair in zip(
            wanted.tolist(), chosen, zip(ids.tolist(), best.tolist())
        ):
            tokens.append(Token(0, token_id, None, logprob, tuple(zip(*pair))))
    return tokens
