"""Route handlers, one file for each group of resources."""
