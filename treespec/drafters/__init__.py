"""Draft sources: the components that propose token trees."""
