"""The book: every method on every set of a plan, equally tuned, and a page for each set, method and claim."""
