"""Pre-training from a file that gives the global batch and leaves its spread to be derived.

    python -m fourfold.launch --devices "0,1,2,3,4,5,6,7" run_pretrain.py -c ./configs_345M_dp8.yaml

The options are those of `fourfold train`; with --auto the layout is chosen too.
"""

import sys

from fourfold.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
