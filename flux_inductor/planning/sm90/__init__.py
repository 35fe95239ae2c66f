"""Planning for the sm_90 kernels (Hopper): the architecture as data, its heuristics, its timeline."""
