"""Reports what was measured or simulated: tables, a verdict, and traces of a step for Perfetto."""
