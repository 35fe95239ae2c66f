"""What executes plans: engines, the state of process groups, traces."""
