"""Sources of guesses: everything that proposes token trees."""
