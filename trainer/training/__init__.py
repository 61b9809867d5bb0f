"""One rank that trains: session, loop, loss, metrics, profiling."""
