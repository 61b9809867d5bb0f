"""MovieLens: source, features, rows and a synthetic generator."""
