"""Training side of Shardloom: engine, data, models, worker loop and driver."""
