"""Pre-training as one of the processes that `python -m fourfold.launch` starts.

    python -m fourfold.launch --log_dir log --devices "0,1,2,3,4,5,6,7" run_pretrain.py \\
        -c ./configs.yaml

The options are those of `fourfold train`; -h lists them.
"""

import sys

from fourfold.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
