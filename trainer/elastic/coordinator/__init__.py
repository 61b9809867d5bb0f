"""The coordinator of replica groups: membership, sync rounds, leases."""
