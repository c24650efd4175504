"""`Term` and `Breakdown`: a number that knows the arithmetic it came from.

The cost models compute with numpy, so that one call evaluates one layout or a hundred thousand. A
term keeps its value, a sentence with holes, and what goes into the holes; `text(index)` fills them
in for one layout. What `--explain` prints is therefore what was computed, not a description of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = Any  # an int, a float, or an array of them: the formulas do not care
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Term:
    """A value (bytes or seconds) and how it was made."""

    value: Numbers
    sentence: str
    inputs: Mapping[str, Numbers] = field(default_factory=dict)

    def at(self, index: int) -> float:
        return float(_item(self.value, index))

    def text(self, index: int = 0) -> str:
        filled = {name: _item(value, index) for name, value in self.inputs.items()}
        return self.sentence.format(**filled)


@dataclass(frozen=True)
class Breakdown:
    """Named terms that add up to `total`."""

    terms: dict[str, Term]

    @property
    def total(self) -> Numbers:
        total: Numbers = 0.0
        for term in self.terms.values():
            total = total + term.value
        return total

    def __getitem__(self, name: str) -> Numbers:
        return self.terms[name].value

    def values_at(self, index: int = 0) -> dict[str, float]:
        return {name: term.at(index) for name, term in self.terms.items()}

    def lines(self, index: int = 0) -> Iterator[tuple[str, float, str]]:
        for name, term in self.terms.items():
            yield name, term.at(index), term.text(index)


def _item(value: Numbers, index: int) -> Any:
    array = np.asarray(value)
    item = array.reshape(-1)[index] if array.ndim and array.size > 1 else array.reshape(-1)[0]
    return item.item()
