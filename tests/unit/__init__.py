"""Tests without Ray, network or sleep."""
