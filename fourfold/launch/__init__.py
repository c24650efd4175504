"""Starting the processes of a run: our own on this machine, or joining those of a launcher."""

from fourfold.launch.join import join_launcher
from fourfold.launch.supervise import supervise
from fourfold.launch.torchrun import torchrun_command

__all__ = ["join_launcher", "supervise", "torchrun_command"]
