"""`python -m fourfold.launch`: what `python -m paddle.distributed.launch` is for Paddle."""

import sys

from fourfold.compat.paddle_launch import main

sys.exit(main(sys.argv[1:]))
