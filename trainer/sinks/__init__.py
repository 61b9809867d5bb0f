"""Where a job's metrics and spans can go beside the service; none of it can hold up training."""
