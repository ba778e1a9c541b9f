"""Pipeline schedules as data: in which order a stage runs its forwards and backwards, and in which phase each is."""
