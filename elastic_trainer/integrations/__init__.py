"""Other trainers under Holdfast, one module each, which imports its framework."""
