"""Tests that drive the service through a real browser: a package, as the browser lives for it."""
