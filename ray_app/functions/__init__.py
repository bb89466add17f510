"""How `@distributed` runs a function of one's own: where, on which workers, here or as a Ray Job."""
