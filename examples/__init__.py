"""Programs that show flux_inductor at work; run from the root of the repository."""
