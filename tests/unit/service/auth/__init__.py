"""Tests of keys, sign-in, permissions and allowed paths."""
