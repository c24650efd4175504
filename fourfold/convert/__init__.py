"""Checkpoint conversion: Hugging Face, FleetX and Megatron checkpoints, in and out.

    open_weights(path)              what kind of checkpoint this is
    load_foreign(path)              the model behind it, by our names; nothing is read yet
    convert(source, target, to)     a new directory in another format

Which networks of Hugging Face's there are is in families.py.

No foreign file runs code: unpickling is done by a machine that builds containers only (pickles.py),
with readers of torch and Paddle files on top of it. Tensors are read one at a time.
"""

from fourfold.convert.conversion import Converted, convert
from fourfold.convert.detect import Source, load_foreign, open_weights
from fourfold.convert.imported import ForeignModel, Kind, options_of
from fourfold.convert.megatron_out import MegatronLayout

__all__ = [
    "Converted",
    "ForeignModel",
    "Kind",
    "MegatronLayout",
    "Source",
    "convert",
    "load_foreign",
    "open_weights",
    "options_of",
]
