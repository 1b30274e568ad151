"""Plans: every figure that follows from a recipe before anything is spent. Never imports torch."""
