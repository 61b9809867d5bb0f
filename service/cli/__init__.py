"""The command line, `shardloom`."""
