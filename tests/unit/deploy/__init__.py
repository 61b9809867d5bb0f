"""What `deploy/` holds: units, images, settings, checked without starting them."""
