"""Places that run attempts: Ray Jobs, and a scripted fake for tests."""
