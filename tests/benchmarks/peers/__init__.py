"""What the benchmarks compare with: plain scripts that use nothing of Shardloom's engine."""
