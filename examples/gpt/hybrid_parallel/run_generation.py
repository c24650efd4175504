"""Text from a checkpoint, by one process or by those that `python -m fourfold.launch` starts.

    python -m fourfold.launch --devices "0,1" run_generation.py -c ./configs_1.3B_dp8.yaml \\
        -o Engine.save_load.ckpt_dir=DIR -o Distributed.mp_degree=2

The options are those of `fourfold generate`. Without a prompt the document's own is continued.
"""

import sys

from fourfold.cli import main
from fourfold.cli.generate import DEFAULT_PROMPT

if __name__ == "__main__":
    words = sys.argv[1:]
    if not any(word.startswith("--prompt") for word in words):
        words += ["--prompt", DEFAULT_PROMPT]
    main(["generate", *words])
