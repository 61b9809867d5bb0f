"""Tests of Shardloom."""
