"""The service as a process, and its databases."""
