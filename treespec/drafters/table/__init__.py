"""The table: an n-gram model with back-off as a draft source that runs no model."""
