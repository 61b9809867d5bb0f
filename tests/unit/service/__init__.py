"""Unit tests of the control plane."""
