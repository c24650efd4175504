"""Pre-training without compilation, by the flags of PaddleNLP's dygraph gpt-3 script.

    python -u -m fourfold.launch --gpus "0,1,2,3,4,5,6,7" --log_dir log run_pretrain.py \\
        --model_type gpt --model_name_or_path gpt2-en --input_dir ./data --output_dir output ...

--help lists the flags; run.sh has a whole command.
"""

import sys

from fourfold.compat.paddlenlp import main

if __name__ == "__main__":
    main("dynamic", "run_pretrain.py", sys.argv[1:])
