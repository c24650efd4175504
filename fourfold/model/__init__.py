"""The GPT itself: single-device code that knows nothing of distribution."""

from fourfold.model.flops import count_parameters, flops_per_token
from fourfold.model.gpt import GPT, ModelShape
from fourfold.model.init import initialize

__all__ = ["GPT", "ModelShape", "count_parameters", "flops_per_token", "initialize"]
