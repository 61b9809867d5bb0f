"""What tests start and share: services, databases, ranks, clocks, waiting. Not tests themselves."""
