"""Ids become text while they arrive: no half characters, and nothing behind a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from fourfold.errors import UserError
from fourfold.tokenizer import Tokenizer

HALF_CHARACTER = "\ufffd"
# Decoding starts this many ids before the new ones, for tokenizers that look at their neighbours.
CONTEXT = 4


class TextStream:
    """`feed` gives the text an id adds; what may yet change is held back until it cannot.

    Held back are the bytes of an unfinished character, and an end that may become a stop string.
    A stop string and all behind it are never given out; `stopped` is true from then on.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        check_stop(stop)
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._decoded = 0  # how many ids are in `_held` or given out
        self._held = ""

    def feed(self, token_id: int) -> str:
        if self.stopped:
            return ""
        self._ids.append(token_id)
        new = self._new_text()
        if new.endswith(HALF_CHARACTER):
            return ""
        self._decoded = len(self._ids)
        return self._give(new, final=False)

    def flush(self) -> str:
        """What was held back, once no id will follow."""
        if self.stopped:
            return ""
        new = self._new_text()
        self._decoded = len(self._ids)
        return self._give(new, final=True)

    def _new_text(self) -> str:
        start = max(0, self._decoded - CONTEXT)
        before = self._tokenizer.decode(self._ids[start : self._decoded])
        return self._tokenizer.decode(self._ids[start:])[len(before) :]

    def _give(self, new: str, final: bool) -> str:
        text = self._held + new
        places = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if places:
            self.stopped, self._held = True, ""
            return text[: min(places)]
        kept = 0 if final else max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` that is the beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def check_stop(stop: Sequence[str]) -> None:
    if "" in stop:
        raise UserError("an empty stop string would end every text before it begins; leave it out")
