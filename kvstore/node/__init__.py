"""One node's store without a bus: the core's decisions carried out in the arenas, and what runs beside them."""
