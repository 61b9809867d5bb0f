"""The dashboard: pages of the jobs, rendered with NiceGUI."""
