"""Starting the processes of a run: our own on this machine, or joining those of a launcher."""

from fourfold.launch.launchers import join_launcher, torchrun_command
from fourfold.launch.supervisor import supervise

__all__ = ["join_launcher", "supervise", "torchrun_command"]
