"""Which queued job starts next, and on which capacity."""
