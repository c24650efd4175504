"""What happens inside a step, in terms that mean the same on every layout.

    modules       the outputs of modules and their gradients: a logical name, the micro-batch of the
                  global batch, and which rectangle of the whole tensor this rank holds
    token_losses  the loss of every token as training computes it, and the largest logits
    step_report   whose loss it was: samples and documents, and the gradient's norm by parameter

Everything here reads and changes nothing: a step that is watched has the bits of one that is not.
"""

from fourfold.trace.modules import SeenTensor, watch_modules
from fourfold.trace.step_report import StepReport, gradient_norms, report_lines
from fourfold.trace.token_losses import TokenLosses

__all__ = [
    "SeenTensor",
    "StepReport",
    "TokenLosses",
    "gradient_norms",
    "report_lines",
    "watch_modules",
]
