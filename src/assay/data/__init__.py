"""Shards, queue, order, batches and exposure: which bytes come when, as pure functions of their names."""
