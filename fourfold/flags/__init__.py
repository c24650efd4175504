"""The command lines of other programs: their flags, read and turned into what Fourfold does."""
