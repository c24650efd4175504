"""`python -m fourfold` is the command `fourfold`."""

from fourfold.cli import main

main()
