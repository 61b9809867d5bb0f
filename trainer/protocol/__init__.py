"""What service, driver and workers exchange: events, files of a run folder, configuration."""
