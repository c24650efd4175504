"""What tests of several parts share: runs, ranks, files, servers."""
