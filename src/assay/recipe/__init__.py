"""Recipes: the schema, loading, the recipe's digest and the schedule's formula. Never imports torch."""
