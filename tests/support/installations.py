"""Installations to plan for."""

from flux_inductor.planning.installed import Engine, Installed

EVERYWHERE = Installed((Engine("cpu"), Engine("cuda")))
