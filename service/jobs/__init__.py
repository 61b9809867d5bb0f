"""What can be done with a job: submit, act on it, read its logs and exports."""
