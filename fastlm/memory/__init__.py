"""Memory: what each layer keeps, what a run will need, and what to change where it would not fit."""
