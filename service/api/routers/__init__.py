"""Route handlers, one module for each group of resources."""
