"""The Ray job that runs an attempt: hosts, worker groups, restarts."""
