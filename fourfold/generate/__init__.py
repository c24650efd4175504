"""Text generation: sampling, greedy search and beam search.

    module = GenerationModule(config)          configuration and checkpoint -> texts (module.py)
    module.generate("Once")                    -> ["Once upon a time ..."]

Below it, each usable alone: `complete` and `generate` for batches of texts and of ids, `Session`
for sequences that come and go (a server), `beam_search`, and `Decoder`, which runs the network with
a KV cache. Lengths count new tokens. Prompt and continuation together must fit into the model's
positions.
"""

from fourfold.generate.completion import Continuation, TextStream, beam_search, complete, generate
from fourfold.generate.decoder import Decoder, SequenceModel
from fourfold.generate.sampling import Options
from fourfold.generate.session import Session, Token

__all__ = [
    "Continuation",
    "Decoder",
    "Options",
    "SequenceModel",
    "Session",
    "TextStream",
    "Token",
    "beam_search",
    "complete",
    "generate",
]
