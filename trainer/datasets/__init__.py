"""Preparing data sets: `shardloom data`."""
