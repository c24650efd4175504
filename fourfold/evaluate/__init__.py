"""Evaluation of trained models: `evaluate(config)` measures what the `Eval` section selects.

| Eval keys                    | measured                                                          |
|------------------------------|-------------------------------------------------------------------|
| eval_path                    | perplexity of a text, by token and by word (WikiText)             |
| eval_path, cloze_eval: True  | accuracy on the last word of each text (LAMBADA)                  |
| none                         | loss, perplexity, bits per byte of prepared data (Data.dataset)   |

harness.py runs the tasks of EleutherAI's `lm_eval` on a checkpoint.
"""

from fourfold.evaluate.measures import Result, evaluate

__all__ = ["Result", "evaluate"]
