"""Any architecture through transformers' own model code: loading it, running it over the paged cache, proving it."""
