"""Tests of the local stack and joined machines."""
