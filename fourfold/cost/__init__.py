"""The price of a step: bytes held, bytes sent, floating-point operations, from formulas.

One set of functions over a network (its table of parameters), a layout and a schedule, with plain
numbers or with numpy arrays of them. A run's banner, `fourfold layout`, `plan`, `--dry-run`, MFU
and `bench` all read them here.
"""
