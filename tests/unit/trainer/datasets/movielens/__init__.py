"""Unit tests of trainer.datasets.movielens."""
