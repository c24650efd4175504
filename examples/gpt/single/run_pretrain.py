"""Pre-training in this process: python run_pretrain.py -c ./configs_345m_single_card.yaml

The options are those of `fourfold train`; -h lists them.
"""

import sys

from fourfold.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
