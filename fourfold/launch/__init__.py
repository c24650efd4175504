"""Starting the processes of a run: our own on this machine, or joining those of a launcher."""
