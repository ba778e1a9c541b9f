"""Reports what was measured or simulated: tables, a verdict, pictures of a step and traces for Perfetto."""
