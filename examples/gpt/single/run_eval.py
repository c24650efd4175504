"""How good a checkpoint is, by the `Eval` section of its file.

    python run_eval.py -c configs_345m_single_card.yaml -o Engine.save_load.ckpt_dir=DIR \\
        -o Eval.eval_path=TEXT

The options are those of `fourfold evaluate`; -h lists them.
"""

import sys

from fourfold.cli import main

if __name__ == "__main__":
    main(["evaluate", *sys.argv[1:]])
