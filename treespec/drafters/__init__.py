"""Draft sources: everything that proposes token trees."""
