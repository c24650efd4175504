"""The network itself: single-device code that knows nothing of distribution."""

from fourfold.model.gpt import GPT
from fourfold.model.init import initialize
from fourfold.model.params import ModelShape, ParamTable

__all__ = [
    "GPT",
    "ModelShape",
    "ParamTable",
    "count_parameters",
    "initialize",
    "network_of",
    "table_of",
]

# The networks there are, by name. Each has a table of its parameters.
NETWORKS: dict[str, type[GPT]] = {"GPT": GPT}


def network_of(shape: ModelShape) -> type[GPT]:
    """The network of such a shape: a class that builds it or a part of it."""
    return NETWORKS[shape.network]


def table_of(shape: ModelShape) -> ParamTable:
    """Every parameter of such a network."""
    return network_of(shape).parameter_table(shape)


def count_parameters(shape: ModelShape) -> int:
    """Exact number of parameters; a head that is tied to the word embedding counts once."""
    return table_of(shape).count()
