"""The scheduler: which queued job starts next, and on which capacity."""
