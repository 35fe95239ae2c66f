"""Installations to plan for."""

from flux_inductor.planning.installed import Installed, InstalledEngine

EVERYWHERE = Installed((InstalledEngine("cpu"), InstalledEngine("cuda")))
