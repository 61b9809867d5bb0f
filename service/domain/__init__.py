"""What a job is and what happens to it: pure, without I/O."""
