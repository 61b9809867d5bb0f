"""Messages between ranks and the coordinator of replica groups, and failure detection."""
