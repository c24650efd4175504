"""Text from a checkpoint.

    python run_generation.py -c configs_345m_single_card.yaml -o Engine.save_load.ckpt_dir=DIR

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
