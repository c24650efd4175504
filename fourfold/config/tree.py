"""`Config`: the whole key tree, resolved and checked by `fourfold.config.load.load_config`."""

from __future__ import annotations

from typing import Any

from pydantic import PrivateAttr

from fourfold.config import network, run, usage
from fourfold.config.fields import Section, section
from fourfold.config.pace import Pace, Ramp
from fourfold.config.render import render_yaml


class Config(Section):
    """One attribute per section; `notices` holds what the user should be told about the result."""

    Global: run.Global = section(run.Global, "The machine and the seed.")
    Engine: run.Engine = section(run.Engine, "The training loop.")
    Data: run.Data = section(run.Data, "Batch sizes and training data.")
    Model: network.Model = section(network.Model, "The network.")
    Distributed: network.Distributed = section(
        network.Distributed, "How the model and the batch are spread over processes."
    )
    Fused: network.Fused = section(network.Fused, "Fusions that change speed and not results.")
    Optimizer: network.Optimizer = section(network.Optimizer, "AdamW and its learning rate.")
    Generation: usage.Generation = section(usage.Generation, "Text generation.")
    Inference: usage.Inference = section(usage.Inference, "The exported model.")
    Eval: usage.Eval = section(usage.Eval, "Offline evaluation of a checkpoint.")
    Profiler: usage.Profiler = section(usage.Profiler, "Where the time of a step goes.")

    _notices: list[str] = PrivateAttr(default_factory=list)

    @property
    def notices(self) -> list[str]:
        """Old spellings used, values adjusted, keys without effect: one line each."""
        return self._notices

    @property
    def pace(self) -> Pace:
        """The samples of every step, once the batch is resolved."""
        sizes = self.Data.batch_size
        ramp = None if sizes.rampup is None else Ramp(*sizes.rampup)
        return Pace(sizes.global_batch_size, ramp)

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump()

    def to_yaml(self, comments: bool = True) -> str:
        """The resolved tree; with comments each key is preceded by its description."""
        return render_yaml(type(self), self.to_dict(), comments=comments)
