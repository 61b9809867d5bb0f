"""Tests of groups that are failure domains: coordinator, sync, copies, whole jobs without Ray."""
