"""Jobs on a real Ray cluster."""
