"""Text to ids and back: tokenizers of every family, with the ids of their own libraries.

    tokenizer = Tokenizer.load("tokenizer.json")    # or a directory, a .model, merge ranks, gpt2
    ids = tokenizer.encode("some text")

`codec` has the class, `files` finds out what a file is, `fast` and `rules` encode much text at
once.
"""

from fourfold.tokenizer.codec import Tokenizer, train
from fourfold.tokenizer.facts import END_OF_TEXT, canonical_identity
from fourfold.tokenizer.files import GPT2, file_in

__all__ = ["END_OF_TEXT", "GPT2", "Tokenizer", "canonical_identity", "file_in", "train"]
