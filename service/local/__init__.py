"""The local stack: `shardloom up`, and machines that join it."""
