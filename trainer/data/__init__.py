"""Parquet sources, batches and the global data position."""
